// Asks the service, with its token if it wants one. What it refuses is thrown with its own sentence.

export class Refused extends Error {
  constructor(sentence, status, after) {
    super(sentence);
    this.status = status;
    this.after = after;
  }
}

let askToken = async () => "";

export function onClosed(ask) {
  askToken = ask;
}

async function send(path, options, token) {
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  try {
    return await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The service does not answer. Is it still running?", 0);
  }
}

export async function ask(path, options = {}) {
  const kept = () => sessionStorage.getItem("token");
  let token = kept();
  let response = await send(path, options, token);
  while (response.status === 401) {
    // Another request may have asked for the token in the meantime.
    if (kept() === token) sessionStorage.setItem("token", await askToken(token));
    token = kept();
    response = await send(path, options, token);
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  const after = Number(response.headers.get("Retry-After")) || 0;
  throw new Refused(said.error || `The service answered with status ${response.status}.`, response.status, after);
}

export async function askJson(path, options) {
  return (await ask(path, options)).json();
}

export function form(fields) {
  const body = new FormData();
  for (const [name, value] of Object.entries(fields)) body.append(name, value);
  return { method: "POST", body };
}

export function sentence(error) {
  const text = String(error.message || error);
  const dotted = /[.?!]$/.test(text) ? text : `${text}.`;
  return dotted[0].toUpperCase() + dotted.slice(1);
}

const wait = (seconds, signal) =>
  new Promise((done, left) => {
    const timer = setTimeout(done, 1000 * seconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      left(signal.reason);
    });
  });

// A picture's bytes: an <img> cannot bring a token. A busy service is asked again.
export async function pictureBlob(path, signal) {
  for (let tries = 0; ; tries += 1) {
    try {
      return await (await ask(path, { signal })).blob();
    } catch (error) {
      if (tries === 3 || (error.status !== 429 && error.status !== 503)) throw error;
      await wait(error.after || 1, signal);
    }
  }
}
