// A small decoder on a CPU: the pass of a block, and that of the whole model with its loss, forward and backward, each as one call.
//
// Legend as in block.h, and V vocabulary, C classes: V filled up to what products sum at a time.

#include "block/block.h"

namespace {

struct Ends {                                // what stands before the blocks and behind them
  const int64_t *tokens, *positions, *targets;         // (T) each; a target below 0 trains nothing
  const float *embedding, *places, *head;    // (V, d), (context, d) or null, (V, d)
  float *d_embedding, *d_places, *d_head;    // their gradients; the first two are always added to, and may be the third
  Norm norm;
  LinearGradients d_norm;
  int64_t vocabulary, context, layers;
  float embedding_scale, loss_scale;
};
constexpr int NO_MEMORY = 1, NO_SUCH_ROW = 2;

// what a pass of the model keeps from its forward part to its backward part, in memory of the caller
template <typename T> struct Kept {
  int64_t classes;
  float *x, *rates;                          // (T, d), (T)
  T *n, *h, *logits;                         // (P, d), (P, d), (P, C)
  const float* head;                         // (C, d)
  Kept(const Shape& s, const Ends& e, Workspace own)
      : classes((e.vocabulary + PAIR<T> - 1) / PAIR<T> * PAIR<T>), x(own.take<float>(s.tokens * s.width)),
        rates(own.take<float>(s.tokens)), n(take<T>(own, s, s.width)), h(take<T>(own, s, s.width)),
        logits(take<T>(own, s, classes)), head(e.head) {
    if (classes == e.vocabulary) return;
    float* filled_up = own.take<float>(classes * s.width);
    std::fill(std::copy_n(e.head, e.vocabulary * s.width, filled_up), filled_up + classes * s.width, 0.f);
    head = filled_up;
  }
};

inline bool has_rows(const Shape& s, const Ends& e) {
  const auto below = [&](const int64_t* x, int64_t end) {
    return std::all_of(x, x + s.tokens, [&](int64_t row) { return uint64_t(row) < uint64_t(end); });
  };
  return below(e.tokens, e.vocabulary) && (!e.places || below(e.positions, e.context)) &&
         std::all_of(e.targets, e.targets + s.tokens, [&](int64_t row) { return row < e.vocabulary; });
}

inline void embed(const Shape& s, const Ends& e, float* x) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < s.tokens; ++row) {
    const float* from = e.embedding + e.tokens[row] * s.width;
    const float* place = e.places ? e.places + e.positions[row] * s.width : nullptr;
    float* to = x + row * s.width;
    const float scale = e.embedding_scale;
#pragma omp simd
    for (int64_t i = 0; i < s.width; ++i) to[i] = from[i] * scale + (place ? place[i] : 0.f);
  }
}

// rows of an embedding's gradient get what its tokens' rows have
inline void embed_back(const Shape& s, const int64_t* rows, float scale, const float* dx, float* to) {
  if (!to) return;
  constexpr int64_t TOGETHER = 32;
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < s.width; first += TOGETHER) {
    const int64_t columns = std::min(TOGETHER, s.width - first);
    for (int64_t row = 0; row < s.tokens; ++row) {
      const float* from = dx + row * s.width + first;
      float* sums = to + rows[row] * s.width + first;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) sums[i] += from[i] * scale;
    }
  }
}

// the summed loss of the targets, and `kept` and each block's numbers and statistics for the backward pass
template <typename T>
int model_forward(const Shape& s, const Ends& e, const Weights* weights, double* loss, T* numbers, float* statistics,
                  Workspace kept, Workspace own) {
  if (!has_rows(s, e)) return NO_SUCH_ROW;
  const Kept<T> k(s, e, kept);
  embed(s, e, k.x);
  for (int64_t layer = 0; layer < e.layers; ++layer)
    if (const int failed = block_forward(s, weights[layer], k.x, k.x, numbers + layer * s.saved_numbers(),
                                         statistics + layer * s.saved_statistics(), own))
      return failed;
  normalise<Number<T>>(s.tokens, s.width, k.x, nullptr, e.norm, nullptr, raw(k.n), raw(k.h), k.rates);
  OF_CLASS("loss");
  apply(s, own, Linear{k.head, nullptr}, k.classes, s.width, k.h, k.logits);
  float* losses = own.take<float>(s.tokens);
  score(s.tokens, e.vocabulary, k.classes, e.targets, nullptr, e.loss_scale, raw(k.logits), losses);
  *loss = 0;
  for (int64_t row = 0; row < s.tokens; ++row) *loss += losses[row];
  return 0;
}

// the gradients of all weights, from what model_forward left
template <typename T>
int model_backward(const Shape& s, const Ends& e, const Weights* weights, const Gradients* to, T* numbers, float* statistics,
                   Workspace kept, Workspace own) {
  const Kept<T> k(s, e, kept);
  Workspace ends = own;                      // what is taken from here is given back before the blocks' passes
  T* dh = take<T>(ends, s, s.width);
  {
    OF_CLASS("loss");
    apply_back(s, ends, Linear{k.head, nullptr}, k.classes, s.width, k.logits, dh);
    float* d_head = k.classes == e.vocabulary ? e.d_head : ends.take<float>(k.classes * s.width);
    if (d_head != e.d_head && s.adds) std::fill_n(d_head, k.classes * s.width, 0.f);
    gradients_of<T>(s, ends, k.logits, k.classes, k.h, s.width, nullptr, {d_head, nullptr});
    if (d_head != e.d_head) put_or_add(d_head, e.vocabulary * s.width, s.adds, e.d_head);
  }
  norm_gradients(s, dh, k.n, e.d_norm);
  std::fill_n(k.x, s.tokens * s.width, 0.f);           // from here on the residual's gradient
  normalise_back(s.tokens, s.width, raw(dh), raw(k.n), k.rates, e.norm, k.x, k.x);
  for (int64_t layer = e.layers - 1; layer >= 0; --layer)
    if (const int failed = block_backward(s, weights[layer], k.x, k.x, numbers + layer * s.saved_numbers(),
                                          statistics + layer * s.saved_statistics(), own, to[layer]))
      return failed;
  embed_back(s, e.tokens, e.embedding_scale, k.x, e.d_embedding);
  embed_back(s, e.positions, 1.f, k.x, e.d_places);
  return 0;
}

template <typename Pass> int guarded(Pass pass) {
  OF_CLASS("elementwise");                   // but for what says otherwise
  try {
    Scratch().take<char>(COMPILING * omp_get_max_threads());
    return pass();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

}  // namespace

#define FOR(T, NAME)                                                                                                           \
  int block_forward_##NAME(const Shape* s, const Weights* w, const float* x, float* out, T* numbers, float* statistics,        \
                           char* memory, int64_t bytes) {                                                                      \
    return guarded([&] { return block_forward(*s, *w, x, out, numbers, statistics, {memory, memory + bytes}); });              \
  }                                                                                                                            \
  int block_backward_##NAME(const Shape* s, const Weights* w, const float* given, float* dx, T* numbers, float* statistics,    \
                            char* memory, int64_t bytes, const Gradients* to) {                                                \
    return guarded([&] { return block_backward(*s, *w, given, dx, numbers, statistics, {memory, memory + bytes}, *to); });     \
  }                                                                                                                            \
  int model_forward_##NAME(const Shape* s, const Ends* e, const Weights* w, double* loss, T* numbers, float* statistics,       \
                           char* kept, int64_t kept_bytes, char* memory, int64_t bytes) {                                      \
    return guarded([&] {                                                                                                       \
      return model_forward(*s, *e, w, loss, numbers, statistics, {kept, kept + kept_bytes}, {memory, memory + bytes});         \
    });                                                                                                                        \
  }                                                                                                                            \
  int model_backward_##NAME(const Shape* s, const Ends* e, const Weights* w, const Gradients* to, T* numbers,                  \
                            float* statistics, char* kept, int64_t kept_bytes, char* memory, int64_t bytes) {                  \
    return guarded([&] {                                                                                                       \
      return model_backward(*s, *e, w, to, numbers, statistics, {kept, kept + kept_bytes}, {memory, memory + bytes});          \
    });                                                                                                                        \
  }

extern "C" {
FOR(float, fp32)
FOR(BFloat16, bf16)
}
