/**
 * Serves the built page and the mock's answers: `node dev/server.mjs FOLDER [PORT]`. Prints its address. The policy for
 * content is the one that the real server should send.
 */
import { createReadStream, existsSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";
import { answer } from "./mock.mjs";

const [folder = "../gyre/api/page", port = "0"] = process.argv.slice(2);
const TYPES = { ".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml" };
export const POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const server = createServer((request, response) => {
  if (answer(request, response)) return;
  const path = normalize(new URL(request.url, "http://page").pathname);
  const file = join(folder, path === "/" ? "index.html" : path);
  if (!existsSync(file)) {
    response.writeHead(404).end();
    return;
  }
  response.writeHead(200, { "Content-Type": TYPES[extname(file)] ?? "application/octet-stream", "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff" });
  createReadStream(file).pipe(response);
});
server.listen(Number(port), "127.0.0.1", () => console.log(`http://127.0.0.1:${server.address().port}/`));
