// A client for /rollout in plain JavaScript, written from shared/PROTOCOL.md alone.
//
//   node rollout.mjs URL '{"prompts": ["12+7="], "group_size": 2, "stream": true}' [KEY]
// It asks for packed arrays, plain or as a stream of frames, and prints the groups as JSON.

// First byte of a number: how it is read, and its size in bytes.
const NUMBERS = {
  0xca: ["getFloat32", 4], 0xcb: ["getFloat64", 8], 0xcc: ["getUint8", 1], 0xcd: ["getUint16", 2],
  0xce: ["getUint32", 4], 0xcf: ["getBigUint64", 8], 0xd0: ["getInt8", 1], 0xd1: ["getInt16", 2],
  0xd2: ["getInt32", 4], 0xd3: ["getBigInt64", 8],
};
// First byte of what has a length: the kind, and how many bytes the length takes.
const SIZED = {
  0xc4: ["bin", 1], 0xc5: ["bin", 2], 0xc6: ["bin", 4], 0xd9: ["str", 1], 0xda: ["str", 2], 0xdb: ["str", 4],
  0xdc: ["array", 2], 0xdd: ["array", 4], 0xde: ["map", 2], 0xdf: ["map", 4],
};

/** Read one msgpack value; the reader's `at` is left behind it. */
function read(reader) {
  const { view } = reader;
  const take = (bytes) => (reader.at += bytes) - bytes;
  const number = ([get, size]) => Number(view[get](take(size)));
  const bytes = (n) => new Uint8Array(view.buffer, view.byteOffset + take(n), n).slice();
  const kinds = {
    bin: bytes,
    str: (n) => new TextDecoder("utf-8", { fatal: true }).decode(bytes(n)),
    array: (n) => Array.from({ length: n }, () => read(reader)),
    map: (n) => Object.fromEntries(Array.from({ length: n }, () => [read(reader), read(reader)])),
  };
  const first = view.getUint8(take(1));
  if (first < 0x80) return first;
  if (first < 0x90) return kinds.map(first & 0x0f);
  if (first < 0xa0) return kinds.array(first & 0x0f);
  if (first < 0xc0) return kinds.str(first & 0x1f);
  if (first >= 0xe0) return first - 0x100;
  if (first in NUMBERS) return number(NUMBERS[first]);
  if (first in SIZED) {
    const [kind, size] = SIZED[first];
    return kinds[kind](number({ 1: NUMBERS[0xcc], 2: NUMBERS[0xcd], 4: NUMBERS[0xce] }[size]));
  }
  if (first === 0xc0) return null;
  if (first === 0xc2 || first === 0xc3) return first === 0xc3;
  throw new Error(`msgpack type 0x${first.toString(16)} is not of this protocol`);
}

function decode(bytes) {
  const reader = { view: new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength), at: 0 };
  const value = read(reader);
  if (reader.at !== bytes.byteLength) throw new Error("there is something behind the document");
  return value;
}

/** Packed int32 or float32, little-endian, as numbers; anything else as it is. */
function unpack(packed, get) {
  if (!(packed instanceof Uint8Array)) return packed;
  const view = new DataView(packed.buffer);
  return Array.from({ length: packed.length / 4 }, (_, i) => view[get](4 * i, true));
}

function readable(group) {
  group.prompt_ids = unpack(group.prompt_ids, "getInt32");
  for (const sample of group.samples) {
    sample.completion_ids = unpack(sample.completion_ids, "getInt32");
    sample.logprobs = unpack(sample.logprobs, "getFloat32");
  }
  return group;
}

/** The groups of a stream, as they come. A stream without its `end` frame is an error. */
async function* groupsOf(body) {
  let rest = Buffer.alloc(0);
  for await (const chunk of body) {
    rest = Buffer.concat([rest, chunk]);
    while (rest.length >= 4 && rest.length >= 4 + rest.readUInt32LE()) {
      const size = 4 + rest.readUInt32LE();
      const frame = decode(rest.subarray(4, size));
      rest = rest.subarray(size);
      if (frame.frame === "group") yield readable(frame);
      if (frame.frame === "error") throw new Error(JSON.stringify(frame.error));
      if (frame.frame === "end") return;
    }
  }
  throw new Error("the stream was cut off");
}

export async function rollout(url, request, key = crypto.randomUUID()) {
  const headers = { "content-type": "application/json", accept: "application/msgpack", "idempotency-key": key };
  const body = JSON.stringify({ packed: true, ...request });
  const answer = await fetch(`${url}/rollout`, { method: "POST", headers, body });
  if (!answer.ok) throw new Error(JSON.stringify(decode(new Uint8Array(await answer.arrayBuffer())).error));
  if (!request.stream) return decode(new Uint8Array(await answer.arrayBuffer())).groups.map(readable);
  const groups = [];
  for await (const group of groupsOf(answer.body)) groups[group.group_id] = group;
  return groups;
}

const [url, request, key] = process.argv.slice(2);
const groups = await rollout(url, JSON.parse(request), key);
console.log(JSON.stringify(groups.map(({ frame, ...group }) => group)));
