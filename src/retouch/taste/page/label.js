"use strict";
const by = (id) => document.getElementById(id);
const PAIR = [["left", "Left", "←", ["ArrowLeft", "1"], "Upper"], ["right", "Right", "→", ["ArrowRight", "2"], "Lower"],
  ["tie", "Tie", "t", ["t", "ArrowUp"]], ["both_bad", "Both bad", "b", ["b", "ArrowDown"]]];
const ALONE = [["good", "Good", "→", ["ArrowRight", "g", "1"]], ["bad", "Bad", "←", ["ArrowLeft", "b", "2"]]];
const shows = { outline: false, source: false };
let voter = "", state = null, busy = false;

function element(tag, told = {}, ...inside) {
  const made = Object.assign(document.createElement(tag), told);
  made.append(...inside);
  return made;
}

// One thing at a time: images that come late must not stand above the buttons of another question.
async function alone(work) {
  if (busy) return;
  busy = true;
  try { await work(); } finally { busy = false; }
}

const ask = (place, told) => alone(async () => {
  try {
    const answer = told === undefined
      ? await fetch(`${place}?voter=${encodeURIComponent(voter)}`)
      : await fetch(place, { method: "POST", body: JSON.stringify({ voter, ...told }) });
    if (!answer.ok) throw new Error(await answer.text());
    state = await answer.json();
    by("problem").textContent = "";
    await draw();
  } catch (error) {
    by("problem").textContent = `Not saved: ${error.message}. Is the command still running?`;
  }
});

function answers() { return state && state.question ? (state.alone ? ALONE : PAIR) : []; }

async function draw() {
  by("voter").textContent = voter;
  by("done").max = Math.max(1, state.goal);
  by("done").value = Math.min(state.votes, state.goal);
  by("count").textContent = `${state.votes} of ${state.goal}`;
  const images = state.question ? state.images : [];
  const told = images.length ? [images[0].prompt, images[0].text && `text: ${images[0].text}`].filter(Boolean).join(" · ") : "";
  by("asked").textContent = state.question ? told : "All images were shown. Ctrl-C in the terminal prints what to do next.";
  const sides = images.map(side);  // shown when they are loaded: nothing moves under the pointer
  await Promise.allSettled(sides.flatMap((one) => [...one.querySelectorAll("img")].map((shown) => shown.decode())));
  by("sides").replaceChildren(...sides);
  by("answers").replaceChildren(
    ...answers().map(([name, label, key, , stacked]) => button(label, key, () => choose(name), name, stacked)),
    button("Undo", "u", () => ask("undo", {}), "undo"));
  for (const id of ["answers", "keys"]) by(id).hidden = false;
}

function button(label, key, press, name, stacked = label) {
  const names = [["beside", label], ["stacked", stacked]].map(([className, textContent]) => element("span", { className, textContent }));
  const made = element("button", { type: "button", onclick: press }, ...names, " ", element("kbd", { textContent: key }));
  made.dataset.answer = name;
  return made;
}

function side(image, place) {
  const shown = element("img", {
    alt: state.alone ? "image" : ["left image", "right image"][place],
    src: `${shows.source && image.source ? "source" : "image"}/${image.number}`,
    onload: () => shown.classList.toggle("small", shown.naturalWidth < 200),
  });
  const frame = element("div", {}, shown);
  if (shows.outline && image.masked) frame.append(element("img", { className: "over", alt: "", src: `outline/${image.number}` }));
  return element("figure", {}, frame);
}

// On a narrow page, or at full size, one image is above the other.
new ResizeObserver(() => {
  const [one, other] = by("sides").children;
  document.body.classList.toggle("stacked", Boolean(other) && other.offsetTop > one.offsetTop);
}).observe(by("sides"));

function choose(answer) { if (state.question) ask("answer", { question: state.question, answer }); }

document.addEventListener("keydown", (event) => {
  if (!state || event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.target.tagName === "INPUT") return;
  const chosen = answers().find(([, , , keys]) => keys.includes(event.key));
  if (chosen) choose(chosen[0]);
  else if (event.key === "u" || event.key === "Backspace") ask("undo", {});
  else if (event.key === "m" || event.key === "s") {
    const part = event.key === "m" ? "outline" : "source";
    alone(() => { shows[part] = !shows[part]; return draw(); });
  } else if (event.key === "f") document.body.classList.toggle("full");
  else return;
  event.preventDefault();
});

function start(name) {
  voter = name;
  sessionStorage.setItem("voter", name);
  by("who").hidden = true;
  document.querySelector("header").hidden = false;
  ask("state");
}

by("who").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = by("name").value.trim().replace(/\s+/g, " ");
  if (name) start(name);
});
const known = sessionStorage.getItem("voter");
if (known) start(known);
