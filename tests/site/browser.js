// Runs in a page that tests/site/test_browser.py serves: loads pages of the site in a frame, and posts what it has seen.
// PAGES, WIDTHS, THEMES and QUERIES are defined before it.

const frame = document.createElement("iframe");
frame.style.height = "900px";
document.body.append(frame);

const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

async function load(path) {
  const loaded = new Promise((resolve) => frame.addEventListener("load", resolve, { once: true }));
  frame.src = path;
  await loaded;
}

function describe(element) {
  return `<${element.tagName.toLowerCase()}> ${(element.textContent || element.getAttribute("src") || "").trim().slice(0, 60)}`;
}

function ancestors(element) {
  const found = [];
  for (let each = element; each && each.nodeType === 1; each = each.parentElement) found.push(each);
  return found;
}

const style = (element) => frame.contentWindow.getComputedStyle(element);

// What sticks out of the page, and is not in a box that can be scrolled.
function clipped(article) {
  const width = frame.contentWindow.innerWidth;
  const scrolls = (each) => ["auto", "scroll"].includes(style(each).overflowX);
  return [...article.querySelectorAll("table, pre, img, svg, p, li, h1, h2, h3, dt, code")]
    .filter((each) => each.getBoundingClientRect().width && each.getBoundingClientRect().right > width + 1)
    .filter((each) => !ancestors(each).some(scrolls))
    .map(describe);
}

function channels(colour) {
  const found = colour.match(/[\d.]+/g);
  return found ? [+found[0], +found[1], +found[2], found[3] === undefined ? 1 : +found[3]] : [0, 0, 0, 0];
}

function luminance(colour) {
  const [red, green, blue] = colour.slice(0, 3).map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

// The contrast of WCAG 2: 1 for equal colours, 21 for black on white.
function contrast(one, other) {
  const [light, dark] = [luminance(one), luminance(other)].sort((a, b) => b - a);
  return (light + 0.05) / (dark + 0.05);
}

function ground(element) {
  const colours = ancestors(element).map((each) => channels(style(each).backgroundColor));
  return colours.find((colour) => colour[3] > 0.5) || [255, 255, 255, 1];
}

// Texts that hardly differ from what is behind them.
function faint(article) {
  const found = [];
  const walker = frame.contentDocument.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const element = text.parentElement;
    if (!text.data.trim() || !element.getClientRects().length || ["STYLE", "TITLE", "SCRIPT"].includes(element.tagName.toUpperCase())) continue;
    if (style(element).visibility === "hidden" || ancestors(element).some((each) => +style(each).opacity < 0.5)) continue;
    const colour = channels(element.namespaceURI.endsWith("svg") ? style(element).fill : style(element).color);
    const seen = contrast(colour, ground(element));
    if (seen < 3) found.push(`${seen.toFixed(1)} ${describe(element)}`);
  }
  return found;
}

// Pictures that do not load, and pictures through which a dark page would show.
function bad(image) {
  if (!image.naturalWidth) return `not loaded: ${image.src}`;
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 64;
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0, 64, 64);
  const pixels = context.getImageData(0, 0, 64, 64).data;
  const isTransparent = pixels.some((value, i) => i % 4 === 3 && value < 128);
  return isTransparent && channels(style(image).backgroundColor)[3] < 0.5 ? `transparent: ${image.src}` : null;
}

async function look(page) {
  await load(page);
  const inside = frame.contentDocument;
  const article = inside.querySelector("article") || inside.body;
  const pictures = [...article.querySelectorAll("img")];
  pictures.forEach((image) => (image.loading = "eager"));
  await Promise.all(pictures.map((image) => image.decode().catch(() => null)));
  const seen = { pictures: pictures.map(bad).filter(Boolean), wide: {}, clipped: {}, faint: {} };
  for (const width of WIDTHS) {
    frame.style.width = `${width}px`;
    const root = inside.documentElement;
    seen.wide[width] = root.scrollWidth - frame.contentWindow.innerWidth;
    seen.clipped[width] = clipped(article);
  }
  for (const theme of THEMES) {
    inside.body.dataset.theme = theme;
    seen.faint[theme] = faint(article);
  }
  return seen;
}

async function search(query) {
  await load(`/search.html?q=${encodeURIComponent(query)}`);
  const done = () => /finished|did not match/.test(frame.contentDocument.querySelector(".search-summary")?.textContent || "");
  while (!done()) await wait(20);
  const links = [...frame.contentDocument.querySelectorAll("ul.search > li > a")];
  return links.map((link) => new URL(link.href).pathname.slice(1));
}

async function main() {
  const results = { pages: {}, searches: {} };
  for (const page of PAGES) results.pages[page] = await look(`/${page}`);
  for (const query of QUERIES) results.searches[query] = await search(query);
  return results;
}

main()
  .catch((error) => ({ error: String(error.stack || error) }))
  .then((results) => fetch("/results", { method: "POST", body: JSON.stringify(results) }));
