"""What holds for the page at every size and in both schemes: nothing overlaps or sticks out, and texts can be read."""

from __future__ import annotations

from typing import Any

OVERLAPS = """(() => {
  const boxes = [...document.querySelectorAll('.tile, .lane h3, #lines text')]
    .map((one) => [one, one.getBoundingClientRect()]);
  const found = [];
  boxes.forEach(([one, a], index) => boxes.slice(index + 1).forEach(([other, b]) => {
    const apart = a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
    if (!apart && !one.contains(other)) found.push(`${one.textContent} and ${other.textContent}`);
  }));
  return found;
})()"""
STICKS_OUT = "Math.max(0, document.documentElement.scrollWidth - innerWidth)"
SMALL = """[...document.querySelectorAll('.tile, #filter, #close')].filter((one) => one.offsetParent)
  .filter((one) => Math.min(one.offsetWidth, one.offsetHeight) < 24).map((one) => one.outerHTML)"""
FAINT = """(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => numbers(color).slice(0, 3).map((one) => one / 255)
    .map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if ((numbers(color)[3] ?? 1) > 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  return [...document.querySelectorAll('main *, header *')]
    .filter((one) => one.offsetParent && [...one.childNodes].some((child) => child.nodeType === 3 && child.data.trim()))
    .map((one) => {
      const pair = [light(getComputedStyle(one).color), light(behind(one))];
      return [(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05), `${one.className}: ${one.textContent}`];
    }).filter(([ratio]) => ratio < 4.5);
})()"""


def check_page(browser: Any) -> None:
    """Fail where tiles, titles or rates overlap, the page sticks out, something is too small to touch or to read."""
    assert browser.run(OVERLAPS) == []
    assert browser.run(STICKS_OUT) == 0
    assert browser.run(SMALL) == []
    assert browser.run(FAINT) == []
