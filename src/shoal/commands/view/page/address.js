// The state of the page is its address: #/group?run=first&file=step_000012&group=3. A link names what one sees.

let current = { view: "home", parameters: {} };
const listeners = [];

export function readAddress(hash = location.hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  return { view: path || "home", parameters: Object.fromEntries(new URLSearchParams(query)) };
}

/** The parameters that have a value, as a query. */
export function queryOf(parameters) {
  return new URLSearchParams(Object.entries(parameters).filter(([, value]) => !["", null, undefined, false].includes(value)));
}

export function addressOf(view, parameters = {}) {
  const text = queryOf(parameters).toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

export function here() {
  return current;
}

/** Opens an address; with `quietly` it takes the place of the present one, and only the state changes. */
export function goTo(view, parameters, { quietly = false } = {}) {
  const hash = addressOf(view, parameters);
  current = readAddress(hash);
  try {
    if (quietly) history.replaceState(null, "", hash);
    else history.pushState(null, "", hash);
  } catch {
    // A page inside a notebook has no address of its own; its state is kept here.
  }
  if (!quietly) listeners.forEach((call) => call(current));
}

/** Changes some parameters of the present view. */
export function change(parameters, options) {
  goTo(current.view, { ...current.parameters, ...parameters }, options);
}

export function onAddress(call) {
  listeners.push(call);
  const follow = () => {
    current = readAddress();
    listeners.forEach((one) => one(current));
  };
  addEventListener("popstate", follow);
  addEventListener("hashchange", () => {
    if (addressOf(current.view, current.parameters) !== addressOf(...Object.values(readAddress()))) follow();
  });
  // Links are followed here: in a notebook's frame the browser would take them for addresses of the notebook.
  addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#']");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button || link.hash === "#content") return;
    event.preventDefault();
    const { view, parameters } = readAddress(link.getAttribute("href"));
    goTo(view, parameters);
    scrollTo(0, 0);
  });
  current = readAddress();
}

/** What this browser keeps of a reader's choices; null for nothing, and in a notebook's frame, which has no storage. */
export function remembered(name) {
  try {
    return localStorage.getItem(`shoal.${name}`);
  } catch {
    return null;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`shoal.${name}`, value);
  } catch {
    // kept for this page only
  }
}
