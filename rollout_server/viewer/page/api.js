// The server, asked with a token that lives as long as the tab.

const KEY = "tito-token";

/** An answer that is not a success; `status` is 0 if there was none. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const rememberToken = (token) => sessionStorage.setItem(KEY, token);
export const forgetToken = () => sessionStorage.removeItem(KEY);

/** The JSON of a GET. */
export async function get(path, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  const headers = { accept: "application/json" };
  const token = sessionStorage.getItem(KEY);
  if (token) headers.authorization = `Bearer ${token}`;
  let answer;
  try {
    answer = await fetch(query ? `${path}?${query}` : path, { headers, cache: "no-store" });
  } catch {
    throw new Refusal(0, "the server does not answer");
  }
  const document = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refusal(answer.status, document.error?.message ?? answer.statusText);
  return document;
}
