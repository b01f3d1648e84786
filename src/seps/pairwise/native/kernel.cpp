// Scores of (image, text) pairs and their gradients, one pair at a time inside the cache.
//
// A pair takes the patches it kept (or all, where the decision has a gradient), weighs their products with the
// words into those of the aggregated tokens, divides by the tokens' lengths, which come from the Gram matrix,
// and aligns. Tokens lie side by side in the lanes of vectors: the aggregated ones, then the others (CLS and the
// residual token), whose cosines are given. Every row of tokens or channels is padded to whole vectors of
// sixteen floats.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#define INLINE static inline __attribute__((always_inline))
typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int WIDTH = 16;
constexpr float SMALLEST = 1e-24f;  // the squared length of a token that is nothing

INLINE Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
INLINE void store(float* to, Vector values) { *reinterpret_cast<Vector*>(to) = values; }
INLINE Vector larger(Vector a, Vector b) { return a > b ? a : b; }
static inline int padded(int count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }
static inline float sum(Vector values) {
  float total = 0;
  for (int lane = 0; lane < WIDTH; lane++) total += values[lane];
  return total;
}
static inline float largest(Vector values) {
  float most = values[0];
  for (int lane = 1; lane < WIDTH; lane++) most = std::max(most, values[lane]);
  return most;
}

// The sums of four vectors, in one place of four floats.
INLINE void store_sums(float* to, Vector a, Vector b, Vector c, Vector d) {
#ifdef __AVX512F__
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
  __m512 all = _mm512_add_ps((__m512)low, (__m512)high);
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all),
                              _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)all, 1)));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
#endif
}

// e to the x for x at most zero, without a branch, so that a loop of it becomes vectors.
static inline float power(float x) {
  x = std::max(x, -87.f);
  const float whole = std::floor(x * 1.44269504f + 0.5f);
  const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float value = 1.9875691500e-4f;
  value = value * rest + 1.3981999507e-3f;
  value = value * rest + 8.3334519073e-3f;
  value = value * rest + 4.1665795894e-2f;
  value = value * rest + 1.6666665459e-1f;
  value = value * rest + 5.0000001201e-1f;
  value = value * rest * rest + rest + 1;
  const int32_t bits = ((int32_t)whole + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return value * scale;
}

// Inner products of long rows: out[m * stride + r] = rows[r] . columns[m].

template <int COLUMNS>
static void dot_tile(const float* const* rows, const float* columns, int length, float* out, int stride) {
  Vector total[COLUMNS][4];
#pragma GCC unroll 6
  for (int m = 0; m < COLUMNS; m++)
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) total[m][r] = Vector{};
  const float *a = rows[0], *b = rows[1], *c = rows[2], *d = rows[3];
  for (int k = 0; k < length; k += WIDTH) {
    const Vector row[4] = {load(a + k), load(b + k), load(c + k), load(d + k)};
#pragma GCC unroll 6
    for (int m = 0; m < COLUMNS; m++) {
      const Vector column = load(columns + (long)m * length + k);
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) total[m][r] += row[r] * column;
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < COLUMNS; m++) store_sums(out + (long)m * stride, total[m][0], total[m][1], total[m][2], total[m][3]);
}

template <int COLUMNS>
INLINE void dot_some(int some, const float* const* rows, const float* columns, int length, float* out, int stride) {
  if (some == COLUMNS) return dot_tile<COLUMNS>(rows, columns, length, out, stride);
  if constexpr (COLUMNS > 1) dot_some<COLUMNS - 1>(some, rows, columns, length, out, stride);
}

// count rows are padded to a multiple of four with the last.
static void dot(const float** rows, int count, const float* columns, int width, int length, float* out, int stride) {
  for (int extra = count; extra % 4; extra++) rows[extra] = rows[count - 1];
  for (int m = 0, tiles = (width + 5) / 6; tiles > 0; tiles--) {
    const int some = (width - m + tiles - 1) / tiles;
    for (int r = 0; r < count; r += 4)
      dot_some<6>(some, rows + r, columns + (long)m * length, length, out + (long)m * stride + r, stride);
    m += some;
  }
}

// Sums of short rows: to[i] = (to[i] +) sum over s of factors[i][at[s]] sources[s].

template <int ROWS, int BLOCKS>
INLINE void accumulate(Vector (&total)[ROWS][BLOCKS], const float* const* factors, const long* at, const float* const* sources,
                       int from, int until, int offset) {
  const float* factor[ROWS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) factor[i] = factors[i];
  for (int s = from; s < until; s++) {
    const float* source = sources[s] + offset;
    const long place = at[s];
    Vector row[BLOCKS];
#pragma GCC unroll 4
    for (int k = 0; k < BLOCKS; k++) row[k] = load(source + k * WIDTH);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const float x = factor[i][place];
#pragma GCC unroll 4
      for (int k = 0; k < BLOCKS; k++) total[i][k] += x * row[k];
    }
  }
}

template <int ROWS, int BLOCKS>
static void combine_tile(float* const* to, const float* const* factors, const long* at, const float* const* sources, int width,
                         int offset, bool add) {
  Vector total[ROWS][BLOCKS] = {};
  accumulate<ROWS, BLOCKS>(total, factors, at, sources, 0, width, offset);
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int k = 0; k < BLOCKS; k++) {
      float* place = to[i] + offset + k * WIDTH;
      store(place, add ? load(place) + total[i][k] : total[i][k]);
    }
}

template <int ROWS, int BLOCKS>
INLINE void combine_some(int some, float* const* to, const float* const* factors, const long* at, const float* const* sources,
                         int width, int offset, bool add) {
  if (some == ROWS) return combine_tile<ROWS, BLOCKS>(to, factors, at, sources, width, offset, add);
  if constexpr (ROWS > 1) combine_some<ROWS - 1, BLOCKS>(some, to, factors, at, sources, width, offset, add);
}

template <int ROWS, int BLOCKS>
static void combine_columns(float* const* to, int count, const float* const* factors, const long* at,
                            const float* const* sources, int width, int offset, bool add) {
  for (int i = 0, tiles = (count + ROWS - 1) / ROWS; tiles > 0; tiles--) {
    const int some = (count - i + tiles - 1) / tiles;
    combine_some<ROWS, BLOCKS>(some, to + i, factors + i, at, sources, width, offset, add);
    i += some;
  }
}

static void combine(float* const* to, int count, const float* const* factors, const long* at, const float* const* sources,
                    int width, int length, bool add) {
  for (int offset = 0; offset < length;) {
    const int left = (length - offset) / WIDTH;
    if (left >= 4) combine_columns<6, 4>(to, count, factors, at, sources, width, offset, add), offset += 4 * WIDTH;
    else if (left == 3) combine_columns<8, 3>(to, count, factors, at, sources, width, offset, add), offset += 3 * WIDTH;
    else if (left == 2) combine_columns<8, 2>(to, count, factors, at, sources, width, offset, add), offset += 2 * WIDTH;
    else combine_columns<8, 1>(to, count, factors, at, sources, width, offset, add), offset += WIDTH;
  }
}

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

// The library's own threads where there are such: others would wait for those to stop spinning.
template <typename Work>
static void spread(int64_t count, int64_t threads, Work work) {
  threads = std::max<int64_t>(std::min(count, threads), 1);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
  {
    const int64_t t = omp_get_thread_num(), all = omp_get_num_threads();
    work(count * t / all, count * (t + 1) / all);
  }
#else
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; t++) others.emplace_back([=] { work(count * t / threads, count * (t + 1) / threads); });
  work(0, count / threads);
  for (auto& other : others) other.join();
#endif
}

extern "C" void meet(const Problem* problem) {
  const Problem& p = *problem;
  spread(p.images * p.texts, p.threads, [&p](int64_t start, int64_t stop) {
    Workspace w(p, false);
    for (int64_t pair = start; pair < stop; pair++) {
      const int image = pair / p.texts, text = pair % p.texts, words = p.words_of(text);
      p.scores[pair] = 0;
      if (words == 0) continue;
      weigh(p, image, text, w);
      compare(p, image, text, w, false);
      if (p.words_side) p.scores[pair] += pool(p, w.by_word.data(), words, w);
      if (p.tokens_side) p.scores[pair] += pool(p, w.by_token.data(), p.all(), w);
    }
  });
}

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

// The gradients of the scores; every array of gradients starts at zero.
extern "C" void meet_backward(const Problem* problem) {
  const Problem& p = *problem;
  std::mutex mutex;
  spread(p.images, p.threads, [&](int64_t start, int64_t stop) {
    Workspace w(p, true);
    for (int64_t image = start; image < stop; image++)
      for (int text = 0; text < p.texts; text++) {
        if (p.words_of(text) == 0 || p.upstream[image * p.texts + text] == 0) continue;
        weigh(p, image, text, w);
        compare(p, image, text, w, true);
        differentiate(p, image, text, w);
      }
    const std::lock_guard<std::mutex> guard(mutex);
    for (size_t i = 0; p.top && i < w.d_relevance.size(); i++) p.d_relevance[i] += w.d_relevance[i];
    for (size_t i = 0; i < w.d_words.size(); i++) p.d_words[i] += w.d_words[i];
  });
}

// 1 for the keep most salient patches of every row, ties to the earlier one; and the softmax of the saliency
// over the others. A saliency lies at image * image_step + text * text_step; real (images, patches) marks its
// patches; decision and residual are (images, texts, patches).
extern "C" void select_top(const float* saliency, const int64_t* keep, const uint8_t* real, int64_t images, int64_t texts,
                           int64_t patches, int64_t image_step, int64_t text_step, int64_t threads, float* decision,
                           float* residual) {
  spread(images * texts, threads, [=](int64_t start, int64_t stop) {
    const int line = padded(patches);
    std::vector<uint32_t> order(line);
    for (int64_t row = start; row < stop; row++) {
      const int64_t image = row / texts, text = row % texts;
      const float* s = saliency + image * image_step + text * text_step;
      const uint8_t* mask = real ? real + image * patches : nullptr;
      // Floats as unsigned numbers of the same order; zero stands for what is no patch.
      uint32_t low = ~0u, high = 0;
      float most = -INFINITY;
      for (int n = 0; n < patches; n++) {
        uint32_t u;
        std::memcpy(&u, s + n, 4);
        u = u == 0x80000000u ? 0 : u;  // the two zeros are equal
        u = u & 0x80000000u ? ~u : u | 0x80000000u;
        u = mask && !mask[n] ? 0 : u;
        order[n] = u, low = std::min(low, u), high = std::max(high, u);
        most = std::max(most, s[n]);
      }
      for (int n = patches; n < line; n++) order[n] = 0;
      const int wanted = keep[image];
      // The bits that all share are known; the others are found from the highest on.
      const int unknown = low == high ? 0 : 32 - __builtin_clz(low ^ high);
      uint32_t threshold = unknown == 32 ? 0 : high >> unknown << unknown;
      for (int bit = unknown - 1; bit >= 0; bit--) {
        const uint32_t trial = threshold | 1u << bit;
        int above = 0;
        for (int n = 0; n < line; n++) above += order[n] >= trial;
        if (above >= wanted) threshold = trial;
        if (above == wanted) break;
      }
      int above = 0, equal = 0;
      for (int n = 0; n < patches; n++) above += order[n] > threshold, equal += order[n] == threshold;
      float *d = decision + row * patches, total = 0;
      for (int n = 0; n < patches; n++) d[n] = order[n] >= threshold ? 1.f : 0.f;
      for (int n = patches - 1, many = above + equal - wanted; many > 0; n--)
        if (order[n] == threshold) d[n] = 0, many--;
      if (!residual) continue;
      float* out = residual + row * patches;
      for (int n = 0; n < patches; n++) out[n] = order[n] == 0 ? 0.f : (1 - d[n]) * power(s[n] - most), total += out[n];
      const float inverse = total > 0 ? 1 / total : 0;
      for (int n = 0; n < patches; n++) out[n] *= inverse;
    }
  });
}
