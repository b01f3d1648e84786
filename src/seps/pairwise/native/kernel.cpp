// Scores of (image, text) pairs and their gradients, one pair at a time inside the cache.
//
// A pair takes the patches it kept (or all, where the decision has a gradient), weighs their products with the
// words into those of the aggregated tokens, divides by the tokens' lengths, which come from the Gram matrix,
// and aligns. Tokens lie side by side in the lanes of vectors: the aggregated ones, then the others (CLS and the
// residual token), whose cosines are given. Every row of tokens or channels is padded to whole vectors of
// sixteen floats.

#include <mutex>
#include <thread>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "gradient.h"

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
