"""One file per resource. A route parses, calls one function and encodes."""
