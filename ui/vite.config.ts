// How the page is built: relative addresses, so that it works below any path; names without hashes, so that a rebuild
// equals the committed files; React Flow and dagre in a part of their own, which only the graph views load.
import react from "@vitejs/plugin-react";
import { defineConfig, type Plugin } from "vite";

/** While developing, the contract's routes are answered by the mock server in dev/. */
function mock(): Plugin {
  return {
    name: "gyre-mock",
    apply: "serve",
    async configureServer(server) {
      // @ts-expect-error: plain JavaScript, for Node runs it as it is
      const { answer } = await import("./dev/mock.mjs");
      server.middlewares.use((request, response, next) => {
        if (!answer(request, response)) next();
      });
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [react(), mock()],
  build: {
    outDir: process.env["GYRE_PAGE_OUT"] ?? "../gyre/api/page",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    license: { fileName: "licenses.md" },
    modulePreload: { polyfill: false },
    rolldownOptions: {
      output: {
        entryFileNames: "assets/[name].js",
        chunkFileNames: "assets/[name].js",
        assetFileNames: "assets/[name][extname]",
      },
    },
  },
});
