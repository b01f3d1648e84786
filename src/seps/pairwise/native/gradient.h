// The gradient of one pair's score, from eq. 5 back to everything the pair was given.

#pragma once
#include "pair.h"

// The gradient of a score by one direction's maxima.
static std::vector<float> unpool(const Problem& p, const float* best, int count, float upstream, Workspace& w) {
  std::vector<float> d_best(count, p.mean ? upstream / count : 0);
  if (p.top) relevance(p, best, count, w, upstream, d_best.data(), w.d_relevance.data());
  return d_best;
}

// The gradient of a score by the cosines: it reaches the places of the maxima, in equal parts where several tie.
static void trace(const Problem& p, int words, float upstream, Workspace& w) {
  const int line = p.line(), all = p.all();
  std::fill(w.d_cosines.begin(), w.d_cosines.begin() + (long)words * line, 0.f);
  const auto slope = [&](float cosine) { return p.leaky && cosine < 0 ? 0.1f : 1.f; };
  // Maxima are compared before they are read through the leaky relu.
  if (p.words_side) {
    std::copy_n(w.by_word.begin(), words, w.maxima.begin());
    pool(p, w.by_word.data(), words, w);
    const std::vector<float> d_best = unpool(p, w.by_word.data(), words, upstream, w);
    for (int m = 0; m < words; m++) {
      const float *row = &w.cosines[(long)m * line], best = w.maxima[m];
      int equal = 0;
      for (int t = 0; t < all; t++) equal += row[t] == best;
      const float part = d_best[m] * slope(best) / equal;
      for (int t = 0; t < all; t++) w.d_cosines[(long)m * line + t] += row[t] == best ? part : 0;
    }
  }
  if (p.tokens_side) {
    std::copy_n(w.by_token.begin(), all, w.maxima.begin());
    pool(p, w.by_token.data(), all, w);
    std::vector<float> part = unpool(p, w.by_token.data(), all, upstream, w);
    std::fill(w.equal.begin(), w.equal.end(), 0.f);
    for (int m = 0; m < words; m++)
      for (int t = 0; t < all; t++) w.equal[t] += w.cosines[(long)m * line + t] == w.maxima[t] ? 1.f : 0.f;
    for (int t = 0; t < all; t++) part[t] *= slope(w.maxima[t]) / w.equal[t];
    for (int m = 0; m < words; m++)
      for (int t = 0; t < all; t++) w.d_cosines[(long)m * line + t] += w.cosines[(long)m * line + t] == w.maxima[t] ? part[t] : 0.f;
  }
}

// From the gradient of the aggregated tokens' weights to those of logits and decisions (eq. 4).
static void unweigh(const Problem& p, int image, int text, Workspace& w) {
  const int patches = p.patches, line = p.line(), tokens = p.tokens;
  const long pair = (long)image * p.texts + text;
  for (int b = 0; b < p.branches; b++) {
    const float share = p.shares[b][pair];
    if (share == 0) continue;
    const float* decision = p.decisions[b] + pair * patches;
    const long start = (long)image * patches * line;
    const float *lifted = p.lifted[b] + start, *logits = p.logits[b] + start;
    for (int k = 0; k < line; k += WIDTH) {
      // Only where a dropped patch receives a gradient does its own size matter: it is bounded by the largest
      // that stays, whose exponential is measured against the largest of all, as lifted is.
      Vector bound = Vector{} + INFINITY;
      if (p.every_patch) {
        bound = Vector{};
        for (int r = 0; r < w.count; r++)
          if (decision[w.index[r]] > 0) bound = larger(bound, load(lifted + w.index[r] * line + k));
        bound *= (float)p.bound;
      }
      Vector total = load(&w.totals[b][k]), inner{};
      total = total > 0 ? total : Vector{} + 1;
      for (int r = 0; r < w.count; r++) {
        const Vector part = load(lifted + w.index[r] * line + k);
        const Vector part_bound = part < bound ? part : bound;
        store(&w.scaled[(long)r * line + k], part_bound / total);
      }
      for (int j = k; j < std::min(k + WIDTH, tokens); j++) {
        if (!w.lowered[b][j]) continue;
        float most = -INFINITY;
        for (int r = 0; r < w.count; r++)
          if (decision[w.index[r]] > 0) most = std::max(most, logits[w.index[r] * line + j]);
        for (int r = 0; r < w.count; r++) {
          const float raised = std::exp(std::min(logits[w.index[r] * line + j] - most, 80.f));
          w.scaled[(long)r * line + j] = std::min(raised, p.every_patch ? (float)p.bound : INFINITY) / w.totals[b][j];
        }
      }
      for (int r = 0; r < w.count; r++)
        inner += decision[w.index[r]] * load(&w.scaled[(long)r * line + k]) * load(&w.d_weights[(long)r * line + k]);
      for (int r = 0; r < w.count; r++) {
        const long n = w.index[r], place = (long)r * line + k;
        const Vector change = share * load(&w.scaled[place]) * (load(&w.d_weights[place]) - inner);
        float* to = p.d_logits[b] + start + n * line + k;
        store(to, load(to) + decision[n] * change);
        if (p.every_patch) p.d_decisions[b][pair * patches + n] += sum(change);
      }
    }
  }
}

// The gradient of the Gram matrix from the turned weights: its upper triangle takes that of both.
static void add_to_gram(const Problem& p, int image, Workspace& w) {
  constexpr int ROWS = 8;
  const int line = p.line(), wide = padded(w.count), tokens = p.tokens;
  float* d_gram = p.d_gram + (long)image * p.patches * p.patches;
  std::vector<float>& out = w.d_met;
  for (int r = 0; r < w.count; r++)
    for (int k = 0; k < line; k += WIDTH)
      store(&w.scaled[(long)r * line + k], load(&w.d_squared[k]) * load(&w.weights[(long)r * line + k]));
  for (int start = 0; start < w.count; start += ROWS) {
    const int some = std::min(ROWS, w.count - start), from = start / WIDTH * WIDTH;
    for (int i = 0; i < some; i++) {
      w.factors[i] = &w.scaled[(long)(start + i) * line];
      w.targets[i] = &out[(long)i * wide];
    }
    for (int j = 0; j < tokens; j++) w.rows[j] = &w.turned[(long)j * wide + from];
    combine(w.targets.data(), some, w.factors.data(), w.steps.data(), w.rows.data(), tokens, wide - from, false);
    for (int i = 0; i < some; i++) {
      float* to = d_gram + w.index[start + i] * p.patches;
      const float* own = &out[(long)i * wide] - from;
      to[w.index[start + i]] += own[start + i];
      for (int s = start + i + 1; s < w.count; s++) to[w.index[s]] += 2 * own[s];
    }
  }
}

// From the gradient of the products, to[m] over the patches that take part, to those of patches and words.
static void unmultiply(const Problem& p, int image, int text, const float* d_met, int wide, Workspace& w) {
  const int words = p.words_of(text), channels = p.channels;
  const long first = p.offsets[text];
  if (p.products) {
    for (int m = 0; m < words; m++) {
      float* to = p.d_products + ((first + m) * p.images + image) * p.patches;
      for (int r = 0; r < w.count; r++) to[w.index[r]] = d_met[m * wide + r];
    }
    return;
  }
  if (p.d_words) {
    for (int r = 0; r < w.count; r++) w.rows[r] = p.values + ((long)image * p.patches + w.index[r]) * channels;
    for (int m = 0; m < words; m++) w.factors[m] = d_met + m * wide, w.targets[m] = &w.d_words[(first + m) * channels];
    combine(w.targets.data(), words, w.factors.data(), w.steps.data(), w.rows.data(), w.count, channels, true);
  }
  if (p.d_values) {
    for (int m = 0; m < words; m++) w.rows[m] = p.words + (first + m) * channels, w.at[m] = (long)m * wide;
    for (int r = 0; r < w.count; r++) {
      w.factors[r] = d_met + r, w.targets[r] = p.d_values + ((long)image * p.patches + w.index[r]) * channels;
    }
    combine(w.targets.data(), w.count, w.factors.data(), w.at.data(), w.rows.data(), words, channels, true);
  }
}

static void differentiate(const Problem& p, int image, int text, Workspace& w) {
  const int line = p.line(), tokens = p.tokens, words = p.words_of(text);
  const long first = p.offsets[text];
  trace(p, words, p.upstream[(long)image * p.texts + text], w);
  // Through the division by lengths: d_cosines becomes the gradient of the products.
  for (int k = 0; k < line; k += WIDTH) {
    const Vector inverse = load(&w.inverse[k]);
    Vector total{};
    for (int m = 0; m < words; m++) {
      const long place = (long)m * line + k;
      total += load(&w.d_cosines[place]) * load(&w.cosines[place]);
      store(&w.d_cosines[place], load(&w.d_cosines[place]) * inverse);
    }
    store(&w.d_squared[k], -0.5f * total * inverse * inverse);
  }
  for (int i = 0; i < p.others; i++)
    for (int m = 0; m < words; m++)
      p.d_sides[i][(first + m) * p.images + image] = w.d_cosines[(long)m * line + tokens + i];
  // Products of patches and words, each of which belongs to one pair.
  const int wide = padded(w.count);
  for (int j = 0; j < tokens; j++) {
    w.rows[j] = &w.turned[(long)j * wide];
    for (int r = 0; r < wide; r++) w.turned[(long)j * wide + r] = r < w.count ? w.weights[(long)r * line + j] : 0;
  }
  for (int m = 0; m < words; m++) w.factors[m] = &w.d_cosines[(long)m * line], w.targets[m] = &w.d_met[(long)m * wide];
  combine(w.targets.data(), words, w.factors.data(), w.steps.data(), w.rows.data(), tokens, wide, false);
  unmultiply(p, image, text, w.d_met.data(), wide, w);
  if (p.d_gram) add_to_gram(p, image, w);
  // Weights, through the products and through the lengths.
  for (int m = 0; m < words; m++) w.rows[m] = &w.d_cosines[(long)m * line], w.at[m] = m * w.across;
  for (int r = 0; r < w.count; r++) {
    w.factors[r] = w.met + w.places[r], w.targets[r] = &w.d_weights[(long)r * line];
    for (int k = 0; k < line; k += WIDTH)
      store(w.targets[r] + k, 2 * load(&w.d_squared[k]) * load(&w.moved[(long)r * line + k]));
  }
  combine(w.targets.data(), w.count, w.factors.data(), w.at.data(), w.rows.data(), words, line, true);
  unweigh(p, image, text, w);
}
