// The score of one pair: weights of its tokens, their cosines with the words, eq. 5.

#pragma once
#include <vector>

#include "vectors.h"

// What a call is about; the names and letters are those of the Python side.
struct Problem {
  int64_t images, texts, patches, channels, tokens, others, branches, threads;
  int64_t every_patch, leaky, mean, top, words_side, tokens_side, bound;
  const float *values, *gram, *words, *sides[2];
  const uint16_t* products;  // bf16
  const int64_t* offsets;
  const float *logits[2], *lifted[2], *decisions[2], *shares[2];
  const float *first_weight, *first_bias, *second_weight, *second_bias;
  float* scores;
  const float* upstream;
  float *d_values, *d_words, *d_products, *d_gram, *d_sides[2], *d_logits[2], *d_decisions[2], *d_relevance;

  int all() const { return tokens + others; }
  int line() const { return padded(all()); }  // the lanes of a row of tokens
  int words_of(int text) const { return offsets[text + 1] - offsets[text]; }
};

// One thread's memory for one pair.
struct Workspace {
  int count;                           // patches that take part
  std::vector<long> index, steps, at;  // those patches; 0, 1, 2, ...; places of factors
  const float* met;                    // the product of word m and the r-th of those patches is
  const long* places;                  // met[m * across + places[r]]
  long across;
  std::vector<float> weights;         // (patches, lanes)
  std::vector<float> moved;           // the Gram matrix times the weights
  std::vector<float> products, cosines, squared, inverse, by_token, by_word, tops, built;
  std::vector<float> totals[2];
  std::vector<char> lowered[2];
  std::vector<int> from;
  std::vector<const float*> rows, weight_rows, factors;
  std::vector<float*> targets;
  // The backward pass.
  std::vector<float> d_cosines, d_squared, d_weights, d_met, turned, scaled, d_relevance, d_words, maxima, equal;

  Workspace(const Problem& p, bool backward) {
    int longest = 1;
    for (int t = 0; t < p.texts; t++) longest = std::max(longest, p.words_of(t));
    const int n = p.patches, line = p.line(), wide = padded(n) + WIDTH, m = padded(longest) + WIDTH;
    const int most = std::max({n, longest, line}) + 2 * WIDTH;
    index.resize(n), at.resize(most), steps.resize(most);
    for (int i = 0; i < most; i++) steps[i] = i;
    weights.resize((long)n * line), moved.resize(backward ? (long)n * line : 0);
    products.resize((long)m * wide), cosines.resize((long)m * line);
    squared.resize(line), inverse.resize(line), by_token.resize(line), by_word.resize(m), tops.resize(p.top + 1), from.resize(p.top + 1);
    for (int b = 0; b < p.branches; b++) totals[b].resize(line), lowered[b].resize(p.tokens);
    rows.resize(most), factors.resize(most), targets.resize(most), weight_rows.resize(n);
    for (int r = 0; r < n; r++) weight_rows[r] = &weights[(long)r * line];
    built.resize(p.gram ? 0 : p.tokens * p.channels);
    if (!backward) return;
    d_cosines.resize((long)m * line), d_squared.resize(line), d_weights.resize((long)n * line);
    d_met.resize((long)std::max(m, 8) * wide), turned.resize((long)line * wide), scaled.resize((long)n * line);
    d_relevance.resize(2 * p.top * p.top + 4 * p.top + 1);
    d_words.resize(p.d_words ? p.offsets[p.texts] * p.channels : 0);
    maxima.resize(std::max(m, line)), equal.resize(line);
  }
};

static inline float squash(float x) { return 0.5f * x * (1 + std::erf(x * 0.70710678f)); }
static inline float slope(float x) {
  return 0.5f * (1 + std::erf(x * 0.70710678f)) + x * 0.39894228f * std::exp(-0.5f * x * x);
}

// Which patches take part, and the aggregated tokens' weights over them (eq. 4).
static void weigh(const Problem& p, int image, int text, Workspace& w) {
  const int patches = p.patches, line = p.line(), tokens = p.tokens;
  const long pair = (long)image * p.texts + text;
  const float* decisions[2];
  int branches[2], some = 0;
  for (int b = 0; b < p.branches; b++)
    if (p.shares[b][pair] != 0) decisions[some] = p.decisions[b] + pair * patches, branches[some++] = b;
  w.count = 0;
  for (int n = 0; n < patches; n++) {
    bool kept = p.every_patch && some;
    for (int i = 0; i < some; i++) kept |= decisions[i][n] > 0;
    w.index[w.count] = n, w.count += kept;
  }
  for (int i = 0; i < some; i++) {
    const int b = branches[i];
    const float *lifted = p.lifted[b] + (long)image * patches * line, *decision = decisions[i];
    for (int k = 0; k < line; k += WIDTH) {
      Vector total{};
      for (int r = 0; r < w.count; r++) total += decision[w.index[r]] * load(lifted + w.index[r] * line + k);
      store(&w.totals[b][k], total);
      const Vector scale = total < 1e-20f ? Vector{} : p.shares[b][pair] / total;
      for (int r = 0; r < w.count; r++) {
        const Vector added = decision[w.index[r]] * scale * load(lifted + w.index[r] * line + k);
        float* to = &w.weights[(long)r * line + k];
        store(to, i ? load(to) + added : added);
      }
    }
    for (int j = 0; j < tokens; j++) {
      w.lowered[b][j] = w.totals[b][j] < 1e-20f;
      if (!w.lowered[b][j]) continue;
      // All that stay lie far below a patch that goes: lift them by their own maximum.
      const float* logits = p.logits[b] + (long)image * patches * line + j;
      float most = -INFINITY, total = 0;
      for (int r = 0; r < w.count; r++)
        if (decision[w.index[r]] > 0) most = std::max(most, logits[w.index[r] * line]);
      auto raised = [&](int r) { return decision[w.index[r]] * std::exp(std::min(logits[w.index[r] * line] - most, 80.f)); };
      for (int r = 0; r < w.count; r++) total += raised(r);
      for (int r = 0; r < w.count; r++) w.weights[(long)r * line + j] += p.shares[b][pair] * raised(r) / total;
      w.totals[b][j] = total;
    }
  }
}

// Squared lengths of BLOCKS vectors of tokens. The part below the diagonal of the symmetric form, doubled,
// suffices; the backward pass needs the whole of it.
template <int BLOCKS>
static void measure(const Problem& p, int image, Workspace& w, int offset, bool whole) {
  constexpr int ROWS = 8;
  const int line = p.line();
  const float *gram = p.gram + (long)image * p.patches * p.patches, *factors[ROWS];
  Vector squared[BLOCKS] = {};
  // The rows that fill no tile come first: there they meet the fewest.
  for (int start = 0, some = (w.count - 1) % ROWS + 1; start < w.count; start += some, some = ROWS) {
    for (int i = 0; i < ROWS; i++) factors[i] = gram + w.index[start + std::min(i, some - 1)] * p.patches;
    Vector total[ROWS][BLOCKS] = {};
    accumulate<ROWS, BLOCKS>(total, factors, w.index.data(), w.weight_rows.data(), 0, whole ? w.count : start, offset);
    if (!whole) {
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int k = 0; k < BLOCKS; k++) total[i][k] *= 2.f;
      accumulate<ROWS, BLOCKS>(total, factors, w.index.data(), w.weight_rows.data(), start, start + some, offset);
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      if (i >= some) break;
#pragma GCC unroll 4
      for (int k = 0; k < BLOCKS; k++) {
        const long place = (long)(start + i) * line + offset + k * WIDTH;
        squared[k] += total[i][k] * load(&w.weights[place]);
        if (whole) store(&w.moved[place], total[i][k]);
      }
    }
  }
  for (int k = 0; k < BLOCKS; k++) store(&w.squared[offset + k * WIDTH], squared[k]);
}

// Products of the patches that take part with the words: made here of the patches that were kept, or given for
// all in bf16.
static void multiply(const Problem& p, int image, int text, Workspace& w) {
  const int words = p.words_of(text), patches = p.patches;
  w.met = w.products.data();
  if (!p.products) {
    for (int r = 0; r < w.count; r++) w.rows[r] = p.values + ((long)image * patches + w.index[r]) * p.channels;
    w.places = w.steps.data(), w.across = padded(w.count + 3);
    dot(w.rows.data(), w.count, p.words + p.offsets[text] * p.channels, words, p.channels, w.products.data(), w.across);
    return;
  }
  w.places = w.index.data(), w.across = padded(patches);
  for (int m = 0; m < words; m++) {
    const uint16_t* from = p.products + ((p.offsets[text] + m) * p.images + image) * patches;
    float* to = &w.products[m * w.across];
    for (int n = 0; n < patches; n++) {
      const uint32_t bits = (uint32_t)from[n] << 16;
      std::memcpy(to + n, &bits, 4);
    }
  }
}

// Cosines before their division by lengths, and squared lengths, from products: tokens in lanes.
static void compare_by_products(const Problem& p, int image, int text, Workspace& w, bool backward) {
  const int line = p.line(), words = p.words_of(text);
  multiply(p, image, text, w);
  for (int m = 0; m < words; m++) {
    w.factors[m] = w.met + m * w.across;
    w.targets[m] = &w.cosines[(long)m * line];
  }
  combine(w.targets.data(), words, w.factors.data(), w.places, w.weight_rows.data(), w.count, line, false);
  for (int offset = 0; offset < line;) {
    const int left = (line - offset) / WIDTH;
    if (left >= 3) measure<3>(p, image, w, offset, backward), offset += 3 * WIDTH;
    else if (left == 2) measure<2>(p, image, w, offset, backward), offset += 2 * WIDTH;
    else measure<1>(p, image, w, offset, backward), offset += WIDTH;
  }
}

// The same from the aggregated tokens themselves, which is cheaper where an image meets few texts (its Gram
// matrix would not pay) or many words.
static void compare_by_building(const Problem& p, int image, int text, Workspace& w) {
  const int tokens = p.tokens, channels = p.channels, line = p.line(), words = p.words_of(text);
  for (int r = 0; r < w.count; r++) {
    w.rows[r] = p.values + ((long)image * p.patches + w.index[r]) * channels;
    w.at[r] = (long)r * line;
  }
  for (int j = 0; j < tokens; j++) w.targets[j] = &w.built[(long)j * channels], w.factors[j] = &w.weights[j];
  combine(w.targets.data(), tokens, w.factors.data(), w.at.data(), w.rows.data(), w.count, channels, false);
  for (int j = 0; j < tokens; j++) {
    const float* own = w.targets[j];
    Vector squared{};
    for (int c = 0; c < channels; c += WIDTH) squared += load(own + c) * load(own + c);
    w.squared[j] = sum(squared), w.rows[j] = own;
  }
  const int stride = padded(tokens + 3);
  dot(w.rows.data(), tokens, p.words + p.offsets[text] * channels, words, channels, w.products.data(), stride);
  for (int m = 0; m < words; m++)
    std::memcpy(&w.cosines[(long)m * line], &w.products[(long)m * stride], tokens * sizeof(float));
}

// Cosines of every word with every slim token, their largest by word and by token (eq. 5).
static void compare(const Problem& p, int image, int text, Workspace& w, bool backward) {
  const int tokens = p.tokens, line = p.line(), words = p.words_of(text), all = p.all();
  if (p.gram)
    compare_by_products(p, image, text, w, backward);
  else
    compare_by_building(p, image, text, w);
  for (int t = tokens; t < all; t++) w.squared[t] = 1;
  for (int m = 0; m < words; m++) {
    float* row = &w.cosines[(long)m * line];
    std::fill(row + tokens, row + line, 0.f);
    for (int i = 0; i < p.others; i++) row[tokens + i] = p.sides[i][(p.offsets[text] + m) * p.images + image];
    w.by_word[m] = -INFINITY;
  }
  for (int t = 0; t < line; t++)
    w.inverse[t] = t < all && w.squared[t] > SMALLEST ? 1 / std::sqrt(w.squared[t]) : 0;
  for (int k = 0; k < line; k += WIDTH) {
    const Vector inverse = load(&w.inverse[k]);
    Vector outside{}, best = Vector{} - INFINITY;
    for (int lane = 0; lane < WIDTH; lane++)
      if (k + lane >= all) outside[lane] = -INFINITY;
    for (int m = 0; m < words; m++) {
      float* row = &w.cosines[(long)m * line + k];
      const Vector cosines = load(row) * inverse;
      store(row, cosines);
      best = larger(best, cosines);
      w.by_word[m] = std::max(w.by_word[m], largest(cosines + outside));
    }
    store(&w.by_token[k], best);
  }
}

// The relevance of the largest maxima; d_best receives its gradient where there is an upstream.
static float relevance(const Problem& p, const float* best, int count, Workspace& w, float upstream, float* d_best, float* d_weights) {
  const int top = p.top;
  float* values = w.tops.data();
  int *from = w.from.data(), found = 0;
  for (int i = 0; i < count; i++) {
    int place = found < top ? found : top - 1;
    if (found == top && best[i] <= values[top - 1]) continue;
    if (found < top) found++;
    while (place > 0 && values[place - 1] < best[i]) values[place] = values[place - 1], from[place] = from[place - 1], place--;
    values[place] = best[i], from[place] = i;
  }
  for (int i = found; i < top; i++) values[i] = 0;
  float result = p.second_bias[0];
  for (int h = 0; h < 2 * top; h++) {
    float x = p.first_bias[h];
    for (int i = 0; i < top; i++) x += p.first_weight[h * top + i] * values[i];
    result += p.second_weight[h] * squash(x);
    if (!d_best) continue;
    float *d_first = d_weights, *d_bias = d_weights + 2 * top * top, *d_second = d_bias + 2 * top;
    const float dx = upstream * p.second_weight[h] * slope(x);
    d_second[h] += upstream * squash(x), d_bias[h] += dx;
    for (int i = 0; i < top; i++) {
      d_first[h * top + i] += dx * values[i];
      if (i < found) d_best[from[i]] += dx * p.first_weight[h * top + i];
    }
  }
  if (d_best) d_weights[2 * top * top + 4 * top] += upstream;
  return result;
}

// One direction of eq. 5 from its maxima, which are read through the leaky relu first: it keeps their order.
static float pool(const Problem& p, float* best, int count, Workspace& w) {
  float total = 0, score = 0;
  for (int i = 0; i < count; i++) {
    if (p.leaky && best[i] < 0) best[i] *= 0.1f;
    total += best[i];
  }
  if (p.mean) score += total / count;
  if (p.top) score += relevance(p, best, count, w, 0, nullptr, nullptr);
  return score;
}
