/**
 * Builds the page anew and compares it with the committed files; and weighs it. `node check.mjs`
 *
 * Fails where a file differs, is missing or too much, or where the whole page is heavier than it may be.
 */
import { execFileSync } from "node:child_process";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const MOST_BYTES = 400_000;
const here = dirname(fileURLToPath(import.meta.url));
const committed = join(here, "../gyre/api/page");
const built = mkdtempSync(join(tmpdir(), "gyre-page-"));

const filesOf = (folder) =>
  new Map(
    readdirSync(folder, { recursive: true, withFileTypes: true })
      .filter((entry) => entry.isFile())
      .map((entry) => join(entry.parentPath, entry.name))
      .map((path) => [relative(folder, path), readFileSync(path)]),
  );

try {
  execFileSync("npm", ["run", "--silent", "build"], { cwd: here, env: { ...process.env, GYRE_PAGE_OUT: built }, stdio: ["ignore", "ignore", "inherit"] });
  const [now, then] = [filesOf(built), filesOf(committed)];
  const wrong = [...new Set([...now.keys(), ...then.keys()])].filter((name) => !now.get(name)?.equals(then.get(name) ?? Buffer.alloc(0))).sort();
  const weight = [...now.values()].reduce((sum, content) => sum + gzipSync(content, { level: 9 }).length, 0);
  console.log(`${now.size} files, ${weight} bytes gzipped of at most ${MOST_BYTES}`);
  for (const name of wrong) console.error(`gyre/api/page/${name} is not what ui/ builds: make ui`);
  if (weight > MOST_BYTES) console.error(`the page is ${weight - MOST_BYTES} bytes too heavy`);
  process.exitCode = wrong.length > 0 || weight > MOST_BYTES ? 1 : 0;
} finally {
  rmSync(built, { recursive: true, force: true });
}
