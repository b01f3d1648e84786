// Draws patches over a picture: the most salient ones left bright, or those a word looked at aglow.

function prepare(canvas, layer) {
  const ratio = window.devicePixelRatio || 1;
  const { width, height } = canvas.getBoundingClientRect();
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  const [rows, columns] = layer.grid;
  const [left, top, right, bottom] = layer.box;
  const across = ((right - left) * canvas.width) / columns;
  const down = ((bottom - top) * canvas.height) / rows;
  const cell = (place) => {
    const x = Math.round(left * canvas.width + (place % columns) * across);
    const y = Math.round(top * canvas.height + Math.floor(place / columns) * down);
    return [x, y, Math.ceil(across), Math.ceil(down)];
  };
  return { pen, cell, count: rows * columns };
}

export function clear(canvas) {
  canvas.width = canvas.width;
  delete canvas.dataset.shows;
}

export function drawKept(canvas, layer, branch, kept) {
  const { pen, cell, count } = prepare(canvas, layer);
  canvas.dataset.shows = `kept ${kept}`;
  if (kept >= count) return;
  pen.fillStyle = "rgb(6 8 14 / 78%)";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  for (const place of layer.branches[branch].order.slice(0, kept)) pen.clearRect(...cell(place));
}

export function drawWord(canvas, layer, place, strongest) {
  const { pen, cell } = prepare(canvas, layer);
  const word = layer.words[place];
  canvas.dataset.shows = `word ${word.text}`;
  pen.fillStyle = "rgb(6 8 14 / 66%)";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  word.map.forEach((value, patch) => {
    const strength = Math.min(1, Math.max(0, value / strongest));
    if (strength < 0.02) return;
    const area = cell(patch);
    // A patch that matters is bright first and coloured second, so that what it shows stays visible.
    pen.clearRect(...area);
    pen.fillStyle = `rgb(6 8 14 / ${66 * (1 - Math.sqrt(strength))}%)`;
    pen.fillRect(...area);
    pen.fillStyle = `rgb(255 164 48 / ${42 * strength}%)`;
    pen.fillRect(...area);
  });
}
