// What every page draws with: elements, counts and times in words, light and dark.

function tail(id) {
  return id.slice(id.lastIndexOf(".") + 1);
}

function grouped(things, keyOf) {
  const groups = new Map();
  for (const thing of things) {
    const key = keyOf(thing);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(thing);
  }
  return groups;
}

function counted(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

function milliseconds(seconds) {
  const value = seconds * 1000;
  return `${value.toFixed(value >= 10 ? 0 : value >= 1 ? 1 : 2)} ms`;
}

// An element with its attributes and children; text is never read as HTML.
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  if (tag === "button") element.type = "button";
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// From light to dark or back; until then the page is as the system is. Gives which it is now.
function switchTheme() {
  const root = document.documentElement;
  const dark = getComputedStyle(root).getPropertyValue("color-scheme").trim() === "dark"
    || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = dark ? "light" : "dark";
  return root.dataset.theme;
}
