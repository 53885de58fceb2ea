// The service's own HTTP routes, on the origin and under the path this page came from.

const KEPT = "cloze-api-key";

const store = storage();
let key = store?.getItem(KEPT) ?? "";

/** The tab's storage, or nothing where the browser forbids it. */
function storage() {
  try {
    return sessionStorage;
  } catch {
    return null;
  }
}

/** An error response, with the service's own message. */
export class ServiceError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => key !== "";

/** Send this key from now on; `keep` stores it until the tab is closed. An empty one forgets it. */
export function setKey(value, keep = false) {
  key = value.trim();
  if (key && keep) store?.setItem(KEPT, key);
  else store?.removeItem(KEPT);
}

/** The path of a model, whose name may have slashes. */
export const pathOf = (model) => `models/${model.split("/").map(encodeURIComponent).join("/")}`;

/** GET, or POST where there is a body: `{ data, timing }`. Throws ServiceError, or AbortError by `signal`. */
export async function call(path, body, signal) {
  const headers = { accept: "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal };
  const started = performance.now();
  const response = await reach(new URL(path, document.baseURI), { ...options, cache: "no-store" });
  const data = await read(response);
  const trip = performance.now() - started;
  if (!response.ok) throw new ServiceError(message(data, response), response.status);
  return { data, timing: { ...timing(response.headers), trip } };
}

async function reach(url, options) {
  return unbroken(fetch(url, options), "The service cannot be reached. Is it running? Try again.");
}

/** The answer's JSON; null for an error that has none. */
async function read(response) {
  const text = await unbroken(response.text(), "The service's answer broke off. Try again.");
  try {
    return JSON.parse(text);
  } catch {
    if (!response.ok) return null;
    throw new ServiceError("The answer is not the service's: it is not JSON. Does something else answer here?", 0);
  }
}

/** What a connection gives, or a ServiceError if it breaks. */
async function unbroken(promise, message) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError(message, 0);
  }
}

/** Native errors are flat, OpenAI's are nested. */
function message(data, response) {
  const found = data?.error?.message ?? data?.error;
  const said = String(found ?? `The service answered ${response.status} ${response.statusText}`);
  const wait = response.headers.get("retry-after");
  if (!wait || said.includes("again in ")) return said;
  return `${said.replace(/[.;]$/, "")}. Try again in ${wait} s.`;
}

/** Milliseconds by stage: from `server-timing`, else from text-embeddings-inference's headers. */
function timing(headers) {
  const found = {};
  for (const entry of (headers.get("server-timing") ?? "").split(",")) {
    const [name, ...parameters] = entry.split(";").map((part) => part.trim());
    const duration = parameters.find((part) => part.startsWith("dur="));
    if (duration) found[name] = Number(duration.slice(4));
  }
  return found;
}

/** Little-endian float32 in base64, as `encoding_format: "base64"` gives it. */
export function decode(base64) {
  const bytes = Uint8Array.from(atob(base64), (sign) => sign.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}
