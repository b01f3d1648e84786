// Vectors of sixteen floats, exponentials, and the two small matrix products that everything is made of.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
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
