// Scores of (image, text) pairs and their gradients, one pair at a time inside the cache.
//
// A pair gathers the patches it kept (or all, where the decision has a gradient), makes their products with
// the words, weighs them into the products of the slim tokens, divides by the tokens' lengths, which come
// from the Gram matrix, and aligns. Vectors are sixteen floats; every row is padded to that.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int WIDTH = 16;

static inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
static inline void store(float* to, Vector values) { *reinterpret_cast<Vector*>(to) = values; }
static inline int padded(int count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }
static inline float sum(Vector values) {
  float total = 0;
  for (int lane = 0; lane < WIDTH; lane++) total += values[lane];
  return total;
}

// The sums of four vectors, in one place of four floats.
static inline void store_sums(float* to, Vector a, Vector b, Vector c, Vector d) {
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

#ifdef __AVX512BF16__
typedef uint16_t Half;
static inline Vector accumulate(Vector total, const Half* a, const Half* b) {
  return (Vector)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b));
}
static inline int step(const Half*) { return 2 * WIDTH; }
#endif
static inline Vector accumulate(Vector total, const float* a, const float* b) { return total + load(a) * load(b); }
static inline int step(const float*) { return WIDTH; }

// out[m * stride + r] = rows[r] . columns[m] for four rows and COUNT columns.
template <int COUNT, typename Number>
static inline void dot_tile(const Number* const* rows, const Number* columns, int length, float* out, int stride) {
  Vector total[COUNT][4];
  for (int m = 0; m < COUNT; m++)
    for (int r = 0; r < 4; r++) total[m][r] = Vector{};
  const int by = step(columns);
  for (int k = 0; k < length; k += by) {
#pragma GCC unroll 6
    for (int m = 0; m < COUNT; m++) {
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) total[m][r] = accumulate(total[m][r], rows[r] + k, columns + (long)m * length + k);
    }
  }
  for (int m = 0; m < COUNT; m++) store_sums(out + (long)m * stride, total[m][0], total[m][1], total[m][2], total[m][3]);
}

// out[m * stride + r] = rows[r] . columns[m]; count rows are padded to a multiple of four with the last.
template <typename Number>
static void dot(const Number** rows, int count, const Number* columns, int width, int length, float* out, int stride) {
  for (int extra = count; extra % 4; extra++) rows[extra] = rows[count - 1];
  for (int r = 0; r < count; r += 4) {
    int m = 0;
    for (; m + 6 <= width; m += 6) dot_tile<6>(rows + r, columns + (long)m * length, length, out + (long)m * stride + r, stride);
    const Number* rest = columns + (long)m * length;
    float* to = out + (long)m * stride + r;
    switch (width - m) {
      case 1: dot_tile<1>(rows + r, rest, length, to, stride); break;
      case 2: dot_tile<2>(rows + r, rest, length, to, stride); break;
      case 3: dot_tile<3>(rows + r, rest, length, to, stride); break;
      case 4: dot_tile<4>(rows + r, rest, length, to, stride); break;
      case 5: dot_tile<5>(rows + r, rest, length, to, stride); break;
    }
  }
}

// to[r] = from[rows[r]] for ascending rows.
static inline void gather(float* to, const float* from, const uint16_t* bits, const int* rows, int count, int patches) {
#ifdef __AVX512F__
  for (int n = 0; n < patches; n += WIDTH) {
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(bits[n / WIDTH], _mm512_loadu_ps(from + n)));
    to += __builtin_popcount(bits[n / WIDTH]);
  }
#else
  for (int r = 0; r < count; r++) to[r] = from[rows[r]];
#endif
}

// What a call is about; the names and letters are those of the Python side. All rows are padded to WIDTH.
struct Problem {
  int64_t images, texts, patches, channels, tokens, branches, has_cls, threads;
  int64_t every_patch, leaky, mean, top, words_side, tokens_side, bound;
  const float *values, *gram, *cls, *words;
  const void *half_values, *half_words;
  const int64_t* offsets;
  const float *logits[2], *lifted[2], *decisions[2], *shares[2];
  const float *residual, *first_weight, *first_bias, *second_weight, *second_bias;
  float* scores;
  const float* upstream;
  float *d_values, *d_gram, *d_cls, *d_words, *d_logits[2], *d_decisions[2], *d_residual, *d_relevance;
};

// One thread's memory for one pair.
struct Workspace {
  std::vector<const float*> rows;
  std::vector<const void*> half_rows;
  std::vector<int> index;
  std::vector<uint16_t> bits;
  std::vector<float> weights, products, cosines, gathered, moved, squared, token, totals, tops, best, d_cosines,
      d_weights, d_products, d_token, d_weights_all, built;
  std::vector<char> lowered;
  std::vector<int> best_token, best_word;
  int count, width;  // rows taken part, their padded number
  static float peak(const Problem& p, int branch, long row) {
    return *std::max_element(p.logits[branch] + row, p.logits[branch] + row + p.patches);
  }
  Workspace(const Problem& p, int longest) {
    const int n = padded(p.patches) + WIDTH, all = p.tokens + 2, m = padded(longest) + WIDTH;
    rows.resize(n + 4), half_rows.resize(n + 4), index.resize(n), bits.resize(n);
    weights.resize((long)p.tokens * n + n), products.resize((long)m * (n + WIDTH)), cosines.resize((long)m * (padded(all) + WIDTH));
    gathered.resize((long)n * n + n), moved.resize((long)p.tokens * n), squared.resize(all + WIDTH);
    token.resize(p.channels), totals.resize(2 * p.tokens), tops.resize(2 * p.top + 2), best.resize(all + m);
    d_cosines.resize(cosines.size()), d_weights.resize(n), d_products.resize(products.size()), d_token.resize(p.channels);
    lowered.resize(2 * p.tokens), best_token.resize(m), best_word.resize(all + WIDTH);
  }
};

static inline float squash(float x) { return 0.5f * x * (1 + std::erf(x * 0.70710678f)); }
static inline float slope(float x) {
  return 0.5f * (1 + std::erf(x * 0.70710678f)) + x * 0.39894228f * std::exp(-0.5f * x * x);
}

// Which patches take part, and the aggregated tokens' weights over them (eq. 4).
static void weigh(const Problem& p, int image, int text, Workspace& w) {
  const int patches = p.patches, line = padded(patches), tokens = p.tokens;
  const long pair = (long)image * p.texts + text;
  w.count = 0;
  for (int n = 0; n < line; n += WIDTH) {
    uint16_t bits = 0;
    for (int lane = 0; lane < WIDTH && n + lane < patches; lane++) {
      bool kept = p.every_patch;
      for (int b = 0; b < p.branches; b++)
        kept |= p.shares[b][pair] != 0 && p.decisions[b][pair * patches + n + lane] > 0;
      if (kept) bits |= 1 << lane, w.index[w.count++] = n + lane;
    }
    w.bits[n / WIDTH] = bits;
  }
  w.width = padded(w.count);
  std::fill(w.weights.begin(), w.weights.begin() + (long)tokens * w.width, 0.f);
  std::vector<float>& picked = w.d_weights;
  float chosen[WIDTH * 512];
  for (int b = 0; b < p.branches; b++) {
    const float share = p.shares[b][pair];
    if (share == 0) {
      for (int j = 0; j < tokens; j++) w.totals[b * tokens + j] = 1;
      continue;
    }
    const float* decision = p.decisions[b] + pair * patches;
    for (int r = 0; r < w.count; r++) chosen[r] = decision[w.index[r]];
    for (int r = w.count; r < w.width; r++) chosen[r] = 0;
    for (int j = 0; j < tokens; j++) {
      const long row = ((long)image * tokens + j) * line;
      gather(picked.data(), p.lifted[b] + row, w.bits.data(), w.index.data(), w.count, line);
      for (int r = w.count; r < w.width; r++) picked[r] = 0;
      float total = 0;
      Vector partial{};
      for (int r = 0; r < w.width; r += WIDTH) partial += load(chosen + r) * load(&picked[r]);
      total = sum(partial);
      w.lowered[b * tokens + j] = total < 1e-20f;
      if (total < 1e-20f) {  // all that stay lie far below a patch that goes: lift them by their own maximum
        float most = -INFINITY;
        for (int r = 0; r < w.count; r++)
          if (chosen[r] > 0) most = std::max(most, p.logits[b][row + w.index[r]]);
        total = 0;
        for (int r = 0; r < w.count; r++) {
          picked[r] = std::exp(std::min(p.logits[b][row + w.index[r]] - most, 80.f));
          total += chosen[r] * picked[r];
        }
      }
      w.totals[b * tokens + j] = total;
      const float scale = share / total;
      float* weights = &w.weights[(long)j * w.width];
      for (int r = 0; r < w.width; r += WIDTH) store(weights + r, load(weights + r) + scale * load(chosen + r) * load(&picked[r]));
    }
  }
}

// targets[r] += sum over m of factors[m * across + r * along] sources[m].
static void add_outer(float* const* targets, int count, const float* const* sources, int width, const float* factors,
                      int across, int along, int length) {
  for (int r = 0; r < count; r += 4) {
    const int some = std::min(4, count - r);
    float* to[4];
    for (int i = 0; i < 4; i++) to[i] = targets[r + std::min(i, some - 1)];
    for (int c = 0; c < length; c += 4 * WIDTH) {
      const int blocks = std::min(4, (length - c) / WIDTH);
      Vector total[4][4] = {};
      if (blocks == 4) {
        for (int m = 0; m < width; m++) {
          const float* from = sources[m] + c;
          const float* factor = factors + (long)m * across + (long)r * along;
          const Vector a = load(from), b = load(from + WIDTH), d = load(from + 2 * WIDTH), e = load(from + 3 * WIDTH);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) {
            const float x = factor[i * along];  // factors are padded: what lies beyond count is not stored
            total[i][0] += x * a, total[i][1] += x * b, total[i][2] += x * d, total[i][3] += x * e;
          }
        }
      } else {
        for (int m = 0; m < width; m++)
          for (int i = 0; i < some; i++)
            for (int k = 0; k < blocks; k++)
              total[i][k] += factors[(long)m * across + (long)(r + i) * along] * load(sources[m] + c + k * WIDTH);
      }
      for (int i = 0; i < some; i++)
        for (int k = 0; k < blocks; k++) store(to[i] + c + k * WIDTH, load(to[i] + c + k * WIDTH) + total[i][k]);
    }
  }
}

// The residual token: the sum of the patches by their residual weights, some channels at a time in registers.
static void blend(const float* values, const float* residual, int patches, int channels, Workspace& w) {
  constexpr int BLOCKS = 8;
  int count = 0;
  float factors[4096];
  for (int n = 0; n < patches; n++)
    if (residual[n] != 0) factors[count] = residual[n], w.rows[count++] = values + (long)n * channels;
  for (int c = 0; c < channels; c += BLOCKS * WIDTH) {
    Vector total[BLOCKS] = {};
    const int blocks = std::min(BLOCKS, (channels - c) / WIDTH);
    if (blocks == BLOCKS) {
      for (int r = 0; r < count; r++) {
#pragma GCC unroll 8
        for (int k = 0; k < BLOCKS; k++) total[k] += factors[r] * load(w.rows[r] + c + k * WIDTH);
      }
    } else {
      for (int r = 0; r < count; r++)
        for (int k = 0; k < blocks; k++) total[k] += factors[r] * load(w.rows[r] + c + k * WIDTH);
    }
    for (int k = 0; k < blocks; k++) store(&w.token[c + k * WIDTH], total[k]);
  }
}

// Cosines and squared lengths from the aggregated tokens themselves, which is cheaper where an image meets
// few texts (its Gram matrix would not pay) or many words.
static void build(const Problem& p, int image, int text, Workspace& w) {
  const int tokens = p.tokens, channels = p.channels, lines = padded(tokens + 2) + WIDTH;
  const long first = p.offsets[text];
  const int words = p.offsets[text + 1] - first;
  const float* values = p.values + (long)image * p.patches * channels;
  w.built.assign((long)tokens * channels, 0.f);
  std::vector<float*> to(tokens);
  for (int j = 0; j < tokens; j++) to[j] = &w.built[(long)j * channels];
  for (int r = 0; r < w.count; r++) w.rows[r] = values + (long)w.index[r] * channels;
  add_outer(to.data(), tokens, w.rows.data(), w.count, w.weights.data(), 1, w.width, channels);
  for (int j = 0; j < tokens; j++) {
    Vector own{};
    for (int c = 0; c < channels; c += WIDTH) own += load(to[j] + c) * load(to[j] + c);
    w.squared[p.has_cls + j] = sum(own);
    w.rows[j] = to[j];
  }
  dot(w.rows.data(), tokens, p.words + first * channels, words, channels, &w.cosines[p.has_cls], lines);
}

// Cosines and squared lengths from the patches' products with the words and with each other.
static void multiply(const Problem& p, int image, int text, Workspace& w, bool backward) {
  const int patches = p.patches, line = padded(patches), tokens = p.tokens, channels = p.channels;
  const long first = p.offsets[text];
  const int words = p.offsets[text + 1] - first;
  const float* values = p.values + (long)image * patches * channels;
  const int stride = padded(w.count) + WIDTH, lines = padded(tokens + 2) + WIDTH;
#ifdef __AVX512BF16__
  if (p.half_values) {
    const Half** rows = reinterpret_cast<const Half**>(w.half_rows.data());
    for (int r = 0; r < w.count; r++) rows[r] = (const Half*)p.half_values + ((long)image * patches + w.index[r]) * channels;
    dot(rows, w.count, (const Half*)p.half_words + first * channels, words, channels, w.products.data(), stride);
  } else
#endif
  {
    for (int r = 0; r < w.count; r++) w.rows[r] = values + (long)w.index[r] * channels;
    dot(w.rows.data(), w.count, p.words + first * channels, words, channels, w.products.data(), stride);
  }
  for (int m = 0; m < words; m++)
    for (int r = w.count; r < w.width; r++) w.products[(long)m * stride + r] = 0;
  // Products of tokens: weights times products, with the products' rows laid at the weights' width.
  std::vector<float>& packed = w.d_products;
  for (int m = 0; m < words; m++) std::memcpy(&packed[(long)m * w.width], &w.products[(long)m * stride], w.width * sizeof(float));
  for (int j = 0; j < tokens; j++) w.rows[j] = &w.weights[(long)j * w.width];
  dot(w.rows.data(), tokens, packed.data(), words, w.width, &w.cosines[p.has_cls], lines);
  // Squared lengths: the upper triangle, its outer part doubled, suffices; the backward pass needs all of it.
  const float* gram = p.gram + (long)image * patches * line;
  for (int r = 0; r < w.count; r++) {
    float* to = &w.gathered[(long)r * w.width];
    gather(to, gram + (long)w.index[r] * line, w.bits.data(), w.index.data(), w.count, line);
    if (!backward) {
      const int start = r / WIDTH * WIDTH;
      for (int k = start; k < r; k++) to[k] = 0;
      const float own = to[r];
      for (int k = start; k < w.width; k += WIDTH) store(to + k, load(to + k) * 2.f);
      to[r] = own;
    }
  }
  // The rows after were overrun by up to a vector; what lies beyond count must be zero.
  for (int r = 0; r < w.count; r++)
    for (int k = w.count; k < w.width; k++) w.gathered[(long)r * w.width + k] = 0;
  constexpr int TILE = 12;
  for (int j = 0; j < tokens; j += TILE) {
    const int some = std::min(TILE, tokens - j);
    Vector length[TILE] = {};
    const float* at[TILE];
    for (int t = 0; t < TILE; t++) at[t] = &w.weights[(long)std::min(j + t, tokens - 1) * w.width];
    for (int k = 0; k < w.width; k += WIDTH) {
      Vector total[TILE] = {};
      const int until = backward ? w.count : std::min(w.count, k + WIDTH);
      for (int r = 0; r < until; r++) {
        const Vector row = load(&w.gathered[(long)r * w.width + k]);
#pragma GCC unroll 12
        for (int t = 0; t < TILE; t++) total[t] += at[t][r] * row;
      }
      for (int t = 0; t < TILE; t++) length[t] += total[t] * load(at[t] + k);
      if (backward)
        for (int t = 0; t < some; t++) store(&w.moved[(long)(j + t) * w.width + k], total[t]);
    }
    for (int t = 0; t < some; t++) w.squared[p.has_cls + j + t] = sum(length[t]);
  }
}

// The products of every slim token with every word, and the tokens' squared lengths.
// cosines[m * stride + t] with t: CLS if there is one, the aggregated tokens, the residual.
static void compare(const Problem& p, int image, int text, Workspace& w, bool backward) {
  const int tokens = p.tokens, channels = p.channels, lines = padded(tokens + 2) + WIDTH, last = p.has_cls + tokens;
  const long pair = (long)image * p.texts + text, first = p.offsets[text];
  const int words = p.offsets[text + 1] - first;
  blend(p.values + (long)image * p.patches * channels, p.residual + pair * p.patches, p.patches, channels, w);
  if (p.gram)
    multiply(p, image, text, w, backward);
  else
    build(p, image, text, w);
  int count = 0;
  w.rows[count++] = w.token.data();
  if (p.has_cls) w.rows[count++] = p.cls + (long)image * channels;
  float* side = w.d_cosines.data();
  dot(w.rows.data(), count, p.words + first * channels, words, channels, side, 4);
  for (int m = 0; m < words; m++) {
    w.cosines[(long)m * lines + last] = side[4 * m];
    if (p.has_cls) w.cosines[(long)m * lines] = side[4 * m + 1];
  }
  Vector own{};
  for (int c = 0; c < channels; c += WIDTH) own += load(&w.token[c]) * load(&w.token[c]);
  w.squared[last] = sum(own);
  if (p.has_cls) w.squared[0] = 1;
}

// The relevance of the largest maxima; d_best receives its gradient where there is an upstream.
static float relevance(const Problem& p, const float* best, int count, Workspace& w, float upstream, float* d_best, float* d_weights) {
  const int top = p.top;
  float* values = w.tops.data();
  int from[64];
  int found = 0;
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

// Eq. 5 from products and squared lengths, which become cosines.
static float align(const Problem& p, int words, Workspace& w) {
  const int all = p.has_cls + p.tokens + 1, lines = padded(p.tokens + 2) + WIDTH;
  float inverse[WIDTH * 512];
  for (int t = 0; t < all; t++) inverse[t] = w.squared[t] > 1e-24f ? 1 / std::sqrt(w.squared[t]) : 0;
  float *by_token = w.best.data(), *by_word = w.best.data() + all;
  for (int t = 0; t < all; t++) by_token[t] = -INFINITY, w.best_word[t] = 0;
  for (int m = 0; m < words; m++) {
    float* row = &w.cosines[(long)m * lines];
    for (int t = 0; t < all; t++) {
      float x = row[t] * inverse[t];
      row[t] = x;
      x = p.leaky && x < 0 ? 0.1f * x : x;
      if (x > by_token[t]) by_token[t] = x, w.best_word[t] = m;
    }
    float most = -INFINITY;
    int place = 0;
    for (int t = 0; t < all; t++) {
      const float x = p.leaky && row[t] < 0 ? 0.1f * row[t] : row[t];
      if (x > most) most = x, place = t;
    }
    by_word[m] = most, w.best_token[m] = place;
  }
  float score = 0;
  if (p.words_side) {
    float total = 0;
    for (int m = 0; m < words; m++) total += by_word[m];
    if (p.mean) score += total / words;
    if (p.top) score += relevance(p, by_word, words, w, 0, nullptr, nullptr);
  }
  if (p.tokens_side) {
    float total = 0;
    for (int t = 0; t < all; t++) total += by_token[t];
    if (p.mean) score += total / all;
    if (p.top) score += relevance(p, by_token, all, w, 0, nullptr, nullptr);
  }
  return score;
}

static int longest_text(const Problem& p) {
  int64_t longest = 1;
  for (int t = 0; t < p.texts; t++) longest = std::max(longest, p.offsets[t + 1] - p.offsets[t]);
  return longest;
}

template <typename Work>
static void spread(int64_t count, int64_t threads, Work work) {
  threads = std::min(count, threads);
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; t++) others.emplace_back([=] { work(count * t / threads, count * (t + 1) / threads); });
  work(0, count / std::max<int64_t>(threads, 1));
  for (auto& other : others) other.join();
}

extern "C" void meet(const Problem* problem) {
  const Problem& p = *problem;
  const int longest = longest_text(p);
  spread(p.images * p.texts, p.threads, [&p, longest](int64_t start, int64_t stop) {
    Workspace w(p, longest);
    for (int64_t pair = start; pair < stop; pair++) {
      const int image = pair / p.texts, text = pair % p.texts, words = p.offsets[text + 1] - p.offsets[text];
      if (words == 0) {
        p.scores[pair] = 0;
        continue;
      }
      weigh(p, image, text, w);
      compare(p, image, text, w, false);
      p.scores[pair] = align(p, words, w);
    }
  });
}

static inline void add_scaled(float* to, float factor, const float* from, int length) {
  for (int c = 0; c < length; c += WIDTH) store(to + c, load(to + c) + factor * load(from + c));
}

struct Entry {
  int word, token;
  float value;
};

// The gradient of a score by the cosines: one entry for every maximum.
static void trace(const Problem& p, int words, float upstream, Workspace& w, std::vector<Entry>& entries, float* d_relevance) {
  const int all = p.has_cls + p.tokens + 1;
  float *by_token = w.best.data(), *by_word = w.best.data() + all;
  std::vector<float> d_word(words, 0.f), d_token(all, 0.f);
  entries.clear();
  if (p.words_side) {
    if (p.mean) std::fill(d_word.begin(), d_word.end(), upstream / words);
    if (p.top) relevance(p, by_word, words, w, upstream, d_word.data(), d_relevance);
    for (int m = 0; m < words; m++) entries.push_back({m, w.best_token[m], d_word[m]});
  }
  if (p.tokens_side) {
    if (p.mean) std::fill(d_token.begin(), d_token.end(), upstream / all);
    if (p.top) relevance(p, by_token, all, w, upstream, d_token.data(), d_relevance);
    for (int t = 0; t < all; t++) entries.push_back({w.best_word[t], t, d_token[t]});
  }
}

// From the gradient of the aggregated tokens' weights to those of logits and decisions (eq. 4).
static void unweigh(const Problem& p, int image, int text, Workspace& w, const float* d_weights) {
  const int patches = p.patches, line = padded(patches), tokens = p.tokens;
  const long pair = (long)image * p.texts + text;
  std::vector<float> share_of(w.width);
  for (int b = 0; b < p.branches; b++) {
    const float share = p.shares[b][pair];
    if (share == 0) continue;
    const float* decision = p.decisions[b] + pair * patches;
    for (int j = 0; j < tokens; j++) {
      const long row = ((long)image * tokens + j) * line;
      const float* lifted = p.lifted[b] + row;
      const float* d_weight = d_weights + (long)j * w.width;
      float top = -INFINITY, total = 0, inner = 0;
      for (int r = 0; r < w.count; r++)
        if (decision[w.index[r]] > 0) top = std::max(top, p.logits[b][row + w.index[r]]);
      const bool low = w.lowered[b * tokens + j];
      // Only where a dropped patch receives a gradient does its own size matter.
      const float bound = p.every_patch ? (float)p.bound : INFINITY;
      const float cap = low || !p.every_patch ? bound : bound * std::exp(top - Workspace::peak(p, b, row));
      for (int r = 0; r < w.count; r++) {
        const int n = w.index[r];
        const float e = low ? std::exp(std::min(p.logits[b][row + n] - top, 80.f)) : lifted[n];
        share_of[r] = std::min(e, cap);
        total += decision[n] * share_of[r];
      }
      for (int r = 0; r < w.count; r++) {
        share_of[r] /= total;
        inner += decision[w.index[r]] * share_of[r] * d_weight[r];
      }
      for (int r = 0; r < w.count; r++) {
        const int n = w.index[r];
        const float change = share * share_of[r] * (d_weight[r] - inner);
        p.d_logits[b][row + n] += decision[n] * change;
        if (p.every_patch) p.d_decisions[b][pair * patches + n] += change;
      }
    }
  }
}

static void differentiate(const Problem& p, int image, int text, Workspace& w, std::vector<Entry>& entries, float* d_words,
                          float* d_relevance) {
  const int patches = p.patches, line = padded(patches), tokens = p.tokens, channels = p.channels;
  const long pair = (long)image * p.texts + text, first = p.offsets[text];
  const int words = p.offsets[text + 1] - first, last = p.has_cls + tokens;
  const int lines = padded(tokens + 2) + WIDTH, stride = padded(w.count) + WIDTH;
  const float* values = p.values + (long)image * patches * channels;
  trace(p, words, p.upstream[pair], w, entries, d_relevance);
  std::vector<float>& d_products = w.d_products;
  std::fill(d_products.begin(), d_products.begin() + (long)words * w.width, 0.f);
  std::fill(w.d_token.begin(), w.d_token.end(), 0.f);
  std::vector<float> d_squared(last + 1, 0.f);
  std::vector<float>& d_weights = w.moved;  // holds gram times weights, scaled below
  for (Entry& entry : entries) {
    const float cosine = w.cosines[(long)entry.word * lines + entry.token];
    const float squared = w.squared[entry.token];
    if (squared <= 1e-24f) {
      entry.value = 0;
      continue;
    }
    if (p.leaky && cosine < 0) entry.value *= 0.1f;
    d_squared[entry.token] -= 0.5f * entry.value * cosine / squared;
    entry.value /= std::sqrt(squared);
  }
  for (int j = 0; j < tokens; j++)
    for (int r = 0; r < w.width; r += WIDTH) {
      float* at = &d_weights[(long)j * w.width + r];
      store(at, load(at) * (2 * d_squared[p.has_cls + j]));
    }
  for (const Entry& entry : entries) {
    if (entry.value == 0) continue;
    const float* word = p.words + (first + entry.word) * channels;
    float* d_word = d_words + (first + entry.word) * channels;
    if (entry.token == last) {
      add_scaled(w.d_token.data(), entry.value, word, channels);
      add_scaled(d_word, entry.value, w.token.data(), channels);
    } else if (p.has_cls && entry.token == 0) {
      add_scaled(p.d_cls + (long)image * channels, entry.value, word, channels);
      add_scaled(d_word, entry.value, p.cls + (long)image * channels, channels);
    } else {
      const long j = entry.token - p.has_cls;
      add_scaled(&d_products[(long)entry.word * w.width], entry.value, &w.weights[j * w.width], w.width);
      add_scaled(&d_weights[j * w.width], entry.value, &w.products[(long)entry.word * stride], w.width);
    }
  }
  add_scaled(w.d_token.data(), 2 * d_squared[last], w.token.data(), channels);
  unweigh(p, image, text, w, d_weights.data());
  // The residual token.
  float* d_residual = p.d_residual + pair * patches;
  const float* residual = p.residual + pair * patches;
  for (int n = 0; n < patches; n++) {
    if (!p.every_patch && residual[n] == 0) continue;
    Vector total{};
    const float* value = values + (long)n * channels;
    for (int c = 0; c < channels; c += WIDTH) total += load(value + c) * load(&w.d_token[c]);
    d_residual[n] = sum(total);
    if (residual[n] != 0) add_scaled(p.d_values + ((long)image * patches + n) * channels, residual[n], w.d_token.data(), channels);
  }
  // Patches and words, through their products.
  std::vector<float*> to(std::max(w.count, words));
  std::vector<const float*> from(std::max(w.count, words));
  for (int r = 0; r < w.count; r++) to[r] = p.d_values + ((long)image * patches + w.index[r]) * channels;
  for (int m = 0; m < words; m++) from[m] = p.words + (first + m) * channels;
  add_outer(to.data(), w.count, from.data(), words, d_products.data(), w.width, 1, channels);
  for (int m = 0; m < words; m++) to[m] = d_words + (first + m) * channels;
  for (int r = 0; r < w.count; r++) from[r] = values + (long)w.index[r] * channels;
  add_outer(to.data(), words, from.data(), w.count, d_products.data(), 1, w.width, channels);
  // The Gram matrix: its upper triangle takes the gradient of both.
  constexpr int TILE = 8;
  float* d_gram = p.d_gram + (long)image * patches * line;
  std::vector<float>& scaled = w.d_weights_all, built;
  for (int j = 0; j < tokens; j++)
    for (int r = 0; r < w.width; r++) scaled[(long)j * w.width + r] = d_squared[p.has_cls + j] * w.weights[(long)j * w.width + r];
  for (int r = 0; r < w.count; r += TILE) {
    for (int k = r / WIDTH * WIDTH; k < w.width; k += WIDTH) {
      Vector total[TILE] = {};
      for (int j = 0; j < tokens; j++) {
        const Vector row = load(&w.weights[(long)j * w.width + k]);
        const float* factor = &scaled[(long)j * w.width + r];
#pragma GCC unroll 8
        for (int t = 0; t < TILE; t++) total[t] += factor[t] * row;
      }
      for (int t = 0; t < TILE && r + t < w.count; t++) {
        float* line_of = d_gram + (long)w.index[r + t] * line;
        for (int lane = 0; lane < WIDTH && k + lane < w.count; lane++) {
          const int other = k + lane;
          if (other >= r + t) line_of[w.index[other]] += (other == r + t ? 1.f : 2.f) * total[t][lane];
        }
      }
    }
  }
}

// The gradients of the scores; every array of gradients starts at zero.
extern "C" void meet_backward(const Problem* problem) {
  const Problem& p = *problem;
  const int longest = longest_text(p);
  const long word_size = (long)p.offsets[p.texts] * p.channels, relevance_size = 2 * p.top * p.top + 4 * p.top + 1;
  std::mutex mutex;
  spread(p.images, p.threads, [&, longest](int64_t start, int64_t stop) {
    Workspace w(p, longest);
    w.d_weights_all.resize((long)p.tokens * (padded(p.patches) + WIDTH) + WIDTH);
    std::vector<float> d_words(word_size, 0.f), d_relevance(relevance_size, 0.f);
    std::vector<Entry> entries;
    for (int64_t image = start; image < stop; image++)
      for (int text = 0; text < p.texts; text++) {
        const int words = p.offsets[text + 1] - p.offsets[text];
        if (words == 0 || p.upstream[image * p.texts + text] == 0) continue;
        weigh(p, image, text, w);
        compare(p, image, text, w, true);
        align(p, words, w);
        differentiate(p, image, text, w, entries, d_words.data(), d_relevance.data());
      }
    const std::lock_guard<std::mutex> guard(mutex);
    for (long i = 0; i < word_size; i++) p.d_words[i] += d_words[i];
    for (long i = 0; p.top && i < relevance_size; i++) p.d_relevance[i] += d_relevance[i];
  });
}

// 1 for the keep most salient patches of every row, ties to the earlier one; and the softmax of the saliency
// over the others. saliency (rows, patches); a row's image is row / texts; real marks its patches.
extern "C" void select_top(const float* saliency, const int64_t* keep, const uint8_t* real, int64_t rows, int64_t texts,
                           int64_t patches, int64_t threads, float* decision, float* residual) {
  spread(rows, threads, [=](int64_t start, int64_t stop) {
    const int line = padded(patches);
    std::vector<uint32_t> order(line);
    for (int64_t row = start; row < stop; row++) {
      const float* s = saliency + row * patches;
      const uint8_t* mask = real ? real + row / texts * patches : nullptr;
      float most = -INFINITY;
      // Floats as unsigned numbers of the same order; zero stands for what is no patch.
      for (int n = 0; n < patches; n++) {
        const float x = s[n];
        uint32_t u;
        std::memcpy(&u, &x, 4);
        if (u == 0x80000000u) u = 0;  // the two zeros are equal
        u = u & 0x80000000u ? ~u : u | 0x80000000u;
        order[n] = mask && !mask[n] ? 0 : u;
        most = std::max(most, x);
      }
      for (int n = patches; n < line; n++) order[n] = 0;
      const int wanted = keep[row / texts];
      uint32_t threshold = 0;
      for (int bit = 31; bit >= 0; bit--) {
        const uint32_t trial = threshold | 1u << bit;
        int above = 0;
        for (int n = 0; n < line; n++) above += order[n] >= trial;
        if (above >= wanted) threshold = trial;
        if (above == wanted) break;
      }
      int above = 0;
      for (int n = 0; n < patches; n++) above += order[n] > threshold;
      int ties = wanted - above;
      float *d = decision + row * patches, total = 0;
      for (int n = 0; n < patches; n++) d[n] = order[n] > threshold || (order[n] == threshold && ties-- > 0) ? 1.f : 0.f;
      if (!residual) continue;
      float* out = residual + row * patches;
      for (int n = 0; n < patches; n++) out[n] = d[n] != 0 || (mask && !mask[n]) ? 0.f : std::exp(s[n] - most);
      for (int n = 0; n < patches; n++) total += out[n];
      const float inverse = total > 0 ? 1 / total : 0;
      for (int n = 0; n < patches; n++) out[n] *= inverse;
    }
  });
}

extern "C" int64_t has_half() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}
