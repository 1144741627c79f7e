// The elementwise stretches of rows.h as functions for Python.

#include "rows.h"

// each for numbers of products in fp32 and in bf16; activations as in models/config.py
#define FOR(N, NAME)                                                                                                           \
  void normalise_##NAME(int64_t rows, int64_t width, const float* x, const N* added, const Norm* norm, float* joined, N* n,    \
                        N* h, float* rates) {                                                                                  \
    normalise(rows, width, x, added, *norm, joined, n, h, rates);                                                              \
  }                                                                                                                            \
  void normalise_back_##NAME(int64_t rows, int64_t width, const N* dh, const N* n, const float* rates, const Norm* norm,       \
                             const float* dx, float* out) {                                                                    \
    normalise_back(rows, width, dh, n, rates, *norm, dx, out);                                                        \
  }                                                                                                                            \
  void activate_##NAME(int64_t rows, int64_t width, int32_t activation, int32_t gated, const N* inner, N* out) {               \
    with_activation(activation, [&](auto kind) {                                                                      \
      if (gated) activate<decltype(kind), true>(rows, width, inner, out);                                                      \
      else activate<decltype(kind), false>(rows, width, inner, out);                                                           \
    });                                                                                                                        \
  }                                                                                                                            \
  void activate_back_##NAME(int64_t rows, int64_t width, int32_t activation, int32_t gated, const N* inner, const N* dout,     \
                            N* out, N* dinner) {                                                                               \
    with_activation(activation, [&](auto kind) {                                                                      \
      if (gated) activate_back<decltype(kind), true>(rows, width, inner, dout, out, dinner);                                   \
      else activate_back<decltype(kind), false>(rows, width, inner, dout, out, dinner);                                        \
    });                                                                                                                        \
  }                                                                                                                            \
  void position_heads_##NAME(const Heads* p, const N* y, N* out) { position_heads(*p, y, out); }                               \
  void position_heads_back_##NAME(const Heads* p, const N* dq, const N* dk, const N* dv, const N* raw, int64_t stride, N* dy,  \
                                  double* sums, int64_t threads) {                                                             \
    position_heads_back(*p, dq, p->heads * p->width, dk, dv, p->kv_heads * p->width, raw, stride, dy, sums, threads);          \
  }                                                                                                                            \
  void add_##NAME(int64_t rows, int64_t width, float* x, const N* y) { add(rows, width, x, y); }                               \
  int score_##NAME(int64_t rows, int64_t vocabulary, const int64_t* targets, const Terms* terms, float scale, N* logits,       \
                   float* losses) {                                                                                            \
    const bool has_all = std::all_of(targets, targets + rows, [&](int64_t target) { return target < vocabulary; });            \
    if (has_all) score(rows, vocabulary, vocabulary, targets, terms, scale, logits, losses);                                   \
    return has_all;                                                                                                            \
  }

extern "C" {
FOR(float, fp32)
FOR(Half, bf16)
}
