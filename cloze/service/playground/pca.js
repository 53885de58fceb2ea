// The first two principal components, by power iteration.

const STEPS = 300;
const ENOUGH = 1e-12; // how far a direction may still turn in one step

/**
 * Vectors of one length, to `points` [[x, y], …] and `shares`, the part of the variance that each axis holds.
 * The same vectors give the same map: nothing is random, and an axis points to where its largest coordinate is.
 */
export function project(vectors) {
  const centred = centre(vectors);
  const gram = centred.length <= (centred[0]?.length ?? 0);
  const square = products(gram ? centred : transposed(centred));
  const variance = square.reduce((sum, row, i) => sum + row[i], 0);
  const axes = [0, 1].map(() => coordinates(square, centred, gram));
  const points = vectors.map((_, i) => axes.map((axis) => axis.along[i]));
  return { points, shares: axes.map((axis) => (variance > 1e-9 ? axis.value / variance : 0)) };
}

/** The strongest direction left in `square`, which loses it: its variance, and where each vector lies along it. */
function coordinates(square, centred, gram) {
  const { direction, value } = strongest(square);
  square.forEach((row, i) => row.forEach((_, j) => (row[j] -= value * direction[i] * direction[j])));
  const along = gram
    ? direction.map((part) => part * Math.sqrt(value))
    : Float64Array.from(centred, (row) => dot(row, direction));
  const largest = along.reduce((most, part) => (Math.abs(part) > Math.abs(most) + 1e-9 ? part : most), 0);
  return { value, along: largest < 0 ? along.map((part) => -part) : along };
}

/** The eigenvector of a symmetric, positive matrix with the largest eigenvalue. */
function strongest(square) {
  const start = square.reduce((best, row, i) => (row[i] > square[best][best] ? i : best), 0);
  let direction = unit(square[start] ?? new Float64Array(0));
  let value = 0;
  for (let step = 0; step < STEPS; step++) {
    const image = Float64Array.from(square, (row) => dot(row, direction));
    value = Math.max(0, dot(image, direction));
    const next = unit(image);
    const turned = 1 - dot(next, direction);
    direction = next;
    if (turned < ENOUGH) break;
  }
  return { direction, value };
}

function centre(vectors) {
  const mean = new Float64Array(vectors[0]?.length ?? 0);
  for (const vector of vectors) vector.forEach((part, i) => (mean[i] += part / vectors.length));
  return vectors.map((vector) => Float64Array.from(vector, (part, i) => part - mean[i]));
}

const transposed = (rows) => Array.from(rows[0] ?? [], (_, i) => Float64Array.from(rows, (row) => row[i]));

/** Every row times every row. */
function products(rows) {
  const found = rows.map(() => new Float64Array(rows.length));
  for (let i = 0; i < rows.length; i++) {
    for (let j = 0; j <= i; j++) found[i][j] = found[j][i] = dot(rows[i], rows[j]);
  }
  return found;
}

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

function unit(vector) {
  const length = Math.sqrt(dot(vector, vector));
  return length > 1e-9 ? vector.map((part) => part / length) : vector.map(() => 0);
}
