/** How tall the box of the runs may be. Pure. */

/** Below the box, in pixels: its border, and what the page has at its end. */
const BELOW = 24;

/** In pixels, of a box that begins so far down the page: what is left of the screen, or all of it where less than half is
 *  left and the page has to be scrolled anyway. */
export function heightFor(top: number, screen: number): number {
  const left = screen - top - BELOW;
  return left >= screen / 2 ? left : Math.max(screen - 2 * BELOW, 0);
}
