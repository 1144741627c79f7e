// One decode step on a CPU: the next token of each of a few documents, through all blocks of a decoder.
//
// So few rows use each weight only once or a few times, so a step takes as long as its weights take to come from memory. All
// blocks are one call and one team of threads, and nothing but weights, keys and values is read from memory. Weights are read
// as they are stored, in bf16 or fp32, and everything is computed in fp32. A row's results are the same bits beside any others.
//
// Legend: H heads, K kv heads, G = H / K, D head width. A row is one document's new token.

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif
#ifdef __AVX512F__
#define KEPT(x) asm("" : "+v"(x))            // in a register: gcc would load it for every product again
#else
#define KEPT(x)
#endif

#include "numbers.h"

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, ROWS = 4;          // rows whose sums, with those of four outputs, stay in registers
#else
constexpr int LANES = 8, ROWS = 2;
#endif
constexpr int OUTPUTS = 4;                   // of a linear, that are computed together
constexpr int64_t TILE = 32;                 // outputs whose weights stay in the cache while all rows meet them

struct Linear {                              // y = W x + bias + B (A x)
  const void* weight;                        // (outputs, inputs), bf16 or fp32
  const float *bias, *a, *b;                 // (outputs), (rank, inputs), (outputs, rank); null: there is none
  int64_t outputs, inputs, rank, is_bf16;
};

struct Norm {
  const float *weight, *bias;
};

struct Block {
  Norm attention_norm, mlp_norm;
  const float *q_norm, *k_norm;              // (D); null: there is none
  Linear qkv, attention_out, mlp_in, mlp_out;
};

struct Model {
  int64_t layers, width, heads, kv_heads, head_width, mlp_width, rotary_width, most_rank;
  int64_t window;                            // tokens that a token sees, itself included; 0 = all
  int64_t is_rms, is_gated, is_parallel;
  int64_t activation;                        // 0 gelu, 1 gelu_tanh, 2 silu
  float epsilon, scale;
  const Block* blocks;
  Norm norm;
  Linear head;
};

struct Documents {
  int64_t rows;
  const int64_t* counts;                     // tokens of each document before the new one
  float* const* keys;                        // of each layer and document: (room, K, D)
  float* const* values;
  const float *cosines, *sines;              // (rows, rotary width)
  int64_t longest() const { return *std::max_element(counts, counts + rows) + 1; }
};

// ---------------------------------------------------------------------------------------------- products

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline Floats many(const float* from) {
  Floats found;
  std::memcpy(&found, from, sizeof found);
  return found;
}
inline Floats many(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
#ifdef __AVX512F__                           // gcc makes five instructions of the conversion, in place of one
  return std::bit_cast<Floats>(std::bit_cast<Words>(_mm512_cvtepu16_epi32(std::bit_cast<__m256i>(halves))) << 16);
#else
  return std::bit_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
#endif
}
inline float one(const float* from) { return *from; }
inline float one(const uint16_t* from) { return std::bit_cast<float>(uint32_t(*from) << 16); }

// a b + c, rounded once where the processor can. Left to itself, a compiler does so in one place and not in another, and a row's
// bits depend on how many rows are beside it
inline float fused(float a, float b, float c) {
#ifdef FP_FAST_FMAF
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}
inline Floats fused(Floats a, Floats b, Floats c) {
#ifdef __AVX512F__
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

template <int N> struct Part { typedef float type __attribute__((vector_size(4 * N))); };

template <int N = LANES> inline float total(typename Part<N>::type x) {
  if constexpr (N == 2) {
    return x[0] + x[1];
  } else {
    typename Part<N / 2>::type halves[2];
    std::memcpy(halves, &x, sizeof halves);
    return total<N / 2>(halves[0] + halves[1]);
  }
}

// sums (rows, outputs) of the products of rows of x and rows of the weight, each `inputs` long and end to end
template <int R, int O, typename W> inline void dots(const float* x, const W* weight, int64_t inputs, float (&sums)[R][O]) {
  Floats held[R][O] = {};
  const int64_t whole = inputs / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) {
    Floats weights[O];
    for (int o = 0; o < O; ++o) {
      weights[o] = many(weight + o * inputs + i);
      __builtin_prefetch(weight + (o + O) * inputs + i);       // rows are short, and the processor sees late where they go on
    }
    for (int r = 0; r < R; ++r) {
      Floats read = many(x + r * inputs + i);
      KEPT(read);
      for (int o = 0; o < O; ++o) held[r][o] = fused(read, weights[o], held[r][o]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < O; ++o) {
      float sum = total(held[r][o]);
      for (int64_t i = whole; i < inputs; ++i) sum = fused(x[r * inputs + i], one(weight + o * inputs + i), sum);
      sums[r][o] = sum;
    }
}

template <int R, int O, typename W>
inline void some(const Linear& linear, const float* x, const float* low, float* y, int64_t first, bool add) {
  float sums[R][O];
  dots<R, O>(x, static_cast<const W*>(linear.weight) + first * linear.inputs, linear.inputs, sums);
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < O; ++o) {
      float found = sums[r][o] + (linear.bias ? linear.bias[first + o] : 0.f);
      const float *b = linear.b + (first + o) * linear.rank, *a = low + r * linear.rank;
      for (int64_t i = 0; i < linear.rank; ++i) found = fused(b[i], a[i], found);
      float& to = y[r * linear.outputs + first + o];
      to = add ? to + found : found;
    }
}

template <int R, typename W>
inline void tile(const Linear& linear, const float* x, const float* low, float* y, int64_t first, int64_t last, bool add) {
  constexpr int WIDE = R == 1 ? 2 * OUTPUTS : OUTPUTS;         // as many sums at once as an addition takes cycles
  for (; first + WIDE <= last; first += WIDE) some<R, WIDE, W>(linear, x, low, y, first, add);
  for (; first < last; ++first) some<R, 1, W>(linear, x, low, y, first, add);
}

template <typename W>
void span(const Linear& linear, int64_t rows, const float* x, const float* low, float* y, int64_t first, int64_t last, bool add) {
  int64_t row = 0;
  for (; row + ROWS <= rows; row += ROWS)
    tile<ROWS, W>(linear, x + row * linear.inputs, low + row * linear.rank, y + row * linear.outputs, first, last, add);
  for (; row < rows; ++row)
    tile<1, W>(linear, x + row * linear.inputs, low + row * linear.rank, y + row * linear.outputs, first, last, add);
}

// outputs `first` to `last` of y (rows, outputs) of x (rows, inputs), or added to y; `low` holds A x (rows, rank)
void span(const Linear& linear, int64_t rows, const float* x, const float* low, float* y, int64_t first, int64_t last, bool add) {
  if (linear.is_bf16) span<uint16_t>(linear, rows, x, low, y, first, last, add);
  else span<float>(linear, rows, x, low, y, first, last, add);
}

void lower(const Linear& linear, int64_t rows, const float* x, float* low) {
  if (!linear.rank) return;
#pragma omp for collapse(2) schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < linear.rank; ++i) {
      float sums[1][1];
      dots<1, 1>(x + row * linear.inputs, linear.a + i * linear.inputs, linear.inputs, sums);
      low[row * linear.rank + i] = sums[0][0];
    }
}

void times(const Linear& linear, int64_t rows, const float* x, float* low, float* y, bool add) {
  lower(linear, rows, x, low);
#pragma omp for schedule(static)
  for (int64_t first = 0; first < linear.outputs; first += TILE)
    span(linear, rows, x, low, y, first, std::min(first + TILE, linear.outputs), add);
}

// ---------------------------------------------------------------------------------------------- the rest of a block

inline float sum_of_products(const float* a, const float* b, int64_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

inline void normalise_rms(const float* x, const float* weight, float epsilon, int64_t width, float* out) {
  const float factor = 1.f / std::sqrt(sum_of_products(x, x, width) / float(width) + epsilon);
  for (int64_t i = 0; i < width; ++i) out[i] = x[i] * factor * weight[i];
}

inline void normalise_layer(const float* x, const Norm& norm, float epsilon, int64_t width, float* out) {
  float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; ++i) sum += x[i];
  const float mean = sum / float(width);
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const float factor = 1.f / std::sqrt(squares / float(width) + epsilon);
  for (int64_t i = 0; i < width; ++i) out[i] = (x[i] - mean) * factor * norm.weight[i] + (norm.bias ? norm.bias[i] : 0.f);
}

// rows of x, normalised, in memory of this thread: to compute them in each costs less than to wait for another
void normalise(const Model& m, const Norm& norm, int64_t rows, const float* x, float* out) {
  for (int64_t row = 0; row < rows; ++row) {
    if (m.is_rms) normalise_rms(x + row * m.width, norm.weight, m.epsilon, m.width, out + row * m.width);
    else normalise_layer(x + row * m.width, norm, m.epsilon, m.width, out + row * m.width);
  }
}

// a head of q or k (D), normalised if it is and turned to its position
inline void turn(const Model& m, const float* norm, const Documents& documents, int64_t row, const float* head, float* out) {
  if (norm) normalise_rms(head, norm, m.epsilon, m.head_width, out);
  else std::copy_n(head, m.head_width, out);
  const int64_t half = m.rotary_width / 2;
  const float *cosines = documents.cosines + row * m.rotary_width, *sines = documents.sines + row * m.rotary_width;
  for (int64_t i = 0; i < half; ++i) {
    const float left = out[i], right = out[i + half];
    out[i] = left * cosines[i] - right * sines[i];
    out[i + half] = right * cosines[i + half] + left * sines[i + half];
  }
}

// N x LANES sums of values (tokens, stride) by their weights, added to `out`
template <int N>
inline void add_weighted(const float* weights, const float* values, int64_t first, int64_t last, int64_t stride, float* out) {
  Floats held[N];
  std::memcpy(held, out, sizeof held);
  for (int64_t t = first; t < last; ++t)
    for (int i = 0; i < N; ++i) held[i] += weights[t] * many(values + t * stride + i * LANES);
  std::memcpy(out, held, sizeof held);
}

// heads of q, k and v (rows, H + 2 K, D) -> mixed values (rows, H, D); keys and values are written behind their document's
void attend(const Model& m, const Block& block, int64_t layer, const Documents& documents, const float* qkv, float* scores,
            float* mixed) {
  const int64_t width = m.head_width, group = m.heads / m.kv_heads, longest = documents.longest();
  const int64_t stride = m.kv_heads * width;
#pragma omp for collapse(2) schedule(static)
  for (int64_t row = 0; row < documents.rows; ++row)
    for (int64_t head = 0; head < m.heads; ++head) {
      const int64_t kv = head / group, last = documents.counts[row];
      const int64_t first = m.window ? std::max<int64_t>(0, last + 1 - m.window) : 0;
      const float* heads = qkv + row * (m.heads + 2 * m.kv_heads) * width;
      const float* value = heads + (m.heads + m.kv_heads + kv) * width;
      float *weights = scores + (row * m.heads + head) * (longest + 2 * width), *query = weights + longest, *key = query + width;
      turn(m, block.q_norm, documents, row, heads + head * width, query);
      turn(m, block.k_norm, documents, row, heads + (m.heads + kv) * width, key);
      float *keys = documents.keys[layer * documents.rows + row] + kv * width;
      float *values = documents.values[layer * documents.rows + row] + kv * width;
      if (head % group == 0) {               // the other heads of the group do not read what is being written
        std::copy_n(key, width, keys + last * stride);
        std::copy_n(value, width, values + last * stride);
      }
      for (int64_t t = first; t < last; ++t) weights[t] = sum_of_products(query, keys + t * stride, width) * m.scale;
      weights[last] = sum_of_products(query, key, width) * m.scale;
      const float largest = *std::max_element(weights + first, weights + last + 1);
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t t = first; t <= last; ++t) {
        weights[t] = power_of_two((weights[t] - largest) * LOG2E);
        sum += weights[t];
      }
      for (int64_t t = first; t <= last; ++t) weights[t] /= sum;
      float* out = mixed + (row * m.heads + head) * width;
      for (int64_t d = 0; d < width; ++d) out[d] = weights[last] * value[d];
      int64_t d = 0;
      for (; d + 4 * LANES <= width; d += 4 * LANES) add_weighted<4>(weights, values + d, first, last, stride, out + d);
      for (; d + LANES <= width; d += LANES) add_weighted<1>(weights, values + d, first, last, stride, out + d);
      for (; d < width; ++d)
        for (int64_t t = first; t < last; ++t) out[d] += weights[t] * values[t * stride + d];
    }
}

inline float activated(float x, int64_t activation) {
  if (activation == 0) return 0.5f * x * (1.f + std::erf(x * 0.707106781f));
  if (activation == 1) return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));    // tanh by way of the sigmoid
  return x * sigmoid(x);
}

// x (rows, width) -> the MLP's inside (rows, mlp width); `inner` holds (rows, mlp width), or with gates (rows, 2 x mlp width)
void enter(const Model& m, const Linear& linear, int64_t rows, const float* x, float* low, float* inner, float* active) {
  lower(linear, rows, x, low);
  const int64_t width = m.mlp_width;
#pragma omp for schedule(static)
  for (int64_t first = 0; first < width; first += TILE) {
    const int64_t last = std::min(first + TILE, width);
    span(linear, rows, x, low, inner, first, last, false);
    if (m.is_gated) span(linear, rows, x, low, inner, width + first, width + last, false);
    for (int64_t row = 0; row < rows; ++row) {
      const float* gates = inner + row * linear.outputs;
      for (int64_t i = first; i < last; ++i)
        active[row * width + i] = activated(gates[i], m.activation) * (m.is_gated ? gates[width + i] : 1.f);
    }
  }
}

// where each result of a block stands in the memory that the caller gives
struct Places {
  Places(const Model& m, const Documents& documents, int threads, float* from) : next_(from) {
    const int64_t rows = documents.rows;
    normed = take(threads * rows * m.width), mlp_normed = take(threads * rows * m.width);
    qkv = take(rows * (m.heads + 2 * m.kv_heads) * m.head_width), mixed = take(rows * m.heads * m.head_width);
    inner = take(rows * m.mlp_width * 2), active = take(rows * m.mlp_width), low = take(rows * m.most_rank);
    scores = take(rows * m.heads * (documents.longest() + 2 * m.head_width));
    floats = next_ - from;
  }
  float *normed, *mlp_normed, *qkv, *mixed, *inner, *active, *low, *scores;
  int64_t floats;

 private:
  float* take(int64_t count) { return std::exchange(next_, next_ + count); }
  float* next_;
};

}  // namespace

extern "C" {

// the floats that a step needs to work in
int64_t decode_floats(const Model* model, const Documents* documents, int threads) {
  return Places(*model, *documents, threads, nullptr).floats;
}

// x (rows, width), the embedded tokens, are changed; logits (rows, V)
void decode_step(const Model* model, const Documents* documents, int threads, float* x, float* work, float* logits) {
  const Model& m = *model;
  const int64_t rows = documents->rows;
  const Places at(m, *documents, threads, work);
#pragma omp parallel num_threads(threads)
  {
    float *normed = at.normed + omp_get_thread_num() * rows * m.width;
    float *mlp_normed = at.mlp_normed + omp_get_thread_num() * rows * m.width;
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      const Block& block = m.blocks[layer];
      normalise(m, block.attention_norm, rows, x, normed);
      if (m.is_parallel) normalise(m, block.mlp_norm, rows, x, mlp_normed);
      times(block.qkv, rows, normed, at.low, at.qkv, false);
      attend(m, block, layer, *documents, at.qkv, at.scores, at.mixed);
      times(block.attention_out, rows, at.mixed, at.low, x, true);
      if (!m.is_parallel) normalise(m, block.mlp_norm, rows, x, mlp_normed);
      enter(m, block.mlp_in, rows, mlp_normed, at.low, at.inner, at.active);
      times(block.mlp_out, rows, at.active, at.low, x, true);
    }
    normalise(m, m.norm, rows, x, normed);
    times(m.head, rows, normed, at.low, logits, false);
  }
}
}
