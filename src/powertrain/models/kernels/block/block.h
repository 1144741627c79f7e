// A block of a small decoder on a CPU, forward and backward.
//
// A small model's time goes to calls: torch takes longer to begin a product than the product takes. Here nothing is called
// but attention.h, rows.h and products of tiles that stay in the cache (oneDNN's, as in attention.h). What is computed and what
// is saved is what fused/parts.py says; products read bf16 or fp32, and sums, residual and gradients are fp32.
//
// Legend: T tokens, P = T filled up to STEP, d width, f MLP width, F = f or with gates 2 f, H heads, K kv heads, D head width,
// E = (H + 2 K) D.

#pragma once

#include <ATen/record_function.h>

#include "ragged/attention.h"
#include "rows/rows.h"

// the class of work that torch's profiler is told, until the end of the scope; see evidence/profile.py
#define OF_CLASS(name) RECORD_USER_SCOPE("powertrain: " name)

namespace {

constexpr int64_t COLUMNS = 128;             // of a tile of a product; its rows are ROWS
constexpr int64_t SUMMED = 512;              // of a product's sum at a time
constexpr int64_t TOKENS = 128;              // the same, where tokens are summed over

template <typename T> using Number = std::conditional_t<std::is_same_v<T, float>, float, Half>;
template <typename T> Number<T>* raw(T* x) { return reinterpret_cast<Number<T>*>(x); }
template <typename T> const Number<T>* raw(const T* x) { return reinterpret_cast<const Number<T>*>(x); }

struct Linear {
  const float *weight, *bias;                // (out, in); a bias of null: there is none
};
struct LinearGradients {
  float *weight, *bias;
};
struct Shape {
  int64_t tokens, width, mlp_width, heads, kv_heads, head_width, rotary_width, window, documents;
  const int64_t *starts, *order;             // of the documents, as attention.h has them
  const float *cosines, *sines;              // (T, rotary width)
  float scale;
  int32_t activation, gated, adds;           // adds: gradients of weights are added to those that are there
  int64_t filled_tokens() const { return filled(tokens); }
  int64_t inner() const { return mlp_width * (gated ? 2 : 1); }
  int64_t mixed() const { return heads * head_width; }
  int64_t all_heads() const { return (heads + 2 * kv_heads) * head_width; }
  int64_t saved_numbers() const { return filled_tokens() * (2 * width + all_heads() + mixed() + inner()); }
  int64_t saved_statistics() const { return tokens * (2 + heads); }
};
struct Weights {
  Norm attention_norm, mlp_norm;
  Linear qkv, out, mlp_in, mlp_out;
};
struct Gradients {
  LinearGradients attention_norm, mlp_norm, qkv, out, mlp_in, mlp_out;
};

// what the backward pass reads, in memory of the caller
template <typename T> struct Saved {
  T *n_attention, *heads, *mixed, *n_mlp, *inner;                    // (P, d), (P, E), (P, H D), (P, d), (P, F)
  float *rates_attention, *rates_mlp, *sums;                         // (T), (T), (T, H)
  Saved(const Shape& s, T* numbers, float* statistics)
      : n_attention(numbers), heads(n_attention + s.filled_tokens() * s.width),
        mixed(heads + s.filled_tokens() * s.all_heads()), n_mlp(mixed + s.filled_tokens() * s.mixed()),
        inner(n_mlp + s.filled_tokens() * s.width), rates_attention(statistics), rates_mlp(rates_attention + s.tokens),
        sums(rates_mlp + s.tokens) {}
};

// the caller's memory for a pass, piece by piece; a copy takes from where this one has come to, and gives all back at its end
struct Workspace {
  char *next, *end;
  template <typename T> T* take(int64_t count) {
    char* piece = next;
    next += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    if (next > end) throw std::bad_alloc();
    return reinterpret_cast<T*>(piece);
  }
};

template <typename T> T* zeroed_behind(const Shape& s, T* rows, int64_t width) {
  std::fill(rows + s.tokens * width, rows + s.filled_tokens() * width, T(0.f));
  return rows;
}

// P rows of a pass's own, zero behind the last token
template <typename T> T* take(Workspace& own, const Shape& s, int64_t width) {
  return zeroed_behind(s, own.take<T>(s.filled_tokens() * width), width);
}

// ---------------------------------------------------------------------------------------------- products

// the right side of products, as tiles of COLUMNS columns side by side, each in the layout that brgemm reads
template <typename T> struct Right {
  const T* tiles;
  int64_t sum, columns;
};

// put(row, column, columns, sums) gets each stretch of a row of left (rows, sum) x right. `block` of the sum are taken at a time.
// With a `stride` left is one matrix, without it a matrix for each block; rows up to the next multiple of STEP can be read
template <typename T, typename Put>
void multiply(int64_t rows, const T* left, int64_t block, int64_t stride, const Right<T>& right, Put put) {
  std::atomic<bool> failed{false};           // errors must not leave threads
  const auto tile_at = [&](int64_t row, int64_t column, float* tile) {
    const int64_t real = std::min(ROWS, rows - row), columns = std::min(COLUMNS, right.columns - column);
    const T* tiles = right.tiles + column * right.sum;
    if (!right.sum) std::fill_n(tile, real * columns, 0.f);
    for (int64_t first = 0; first < right.sum; first += block) {
      const int64_t together = std::min(block, right.sum - first), step = stride ? stride : together;
      const T* from = (stride ? left + first : left + first * filled(rows)) + row * step;
      product(filled(real), columns, together, from, step, tiles + first * columns, columns, tile, columns, first > 0);
    }
    for (int64_t r = 0; r < real; ++r) put(row + r, column, columns, tile + r * columns);
  };
#pragma omp parallel
  {
    alignas(64) float tile[ROWS * COLUMNS];
#pragma omp for collapse(2) schedule(static)
    for (int64_t row = 0; row < rows; row += ROWS)
      for (int64_t column = 0; column < right.columns; column += COLUMNS) try {
          tile_at(row, column, tile);
        } catch (...) {
          failed = true;
        }
    at::native::cpublas::brgemm_release();
  }
  if (failed) throw std::bad_alloc();        // the only error of a product whose shape and type are right
}

// put as above, of x (P, sum) x right
template <typename T, typename Put> void multiply_rows(const Shape& s, const T* x, const Right<T>& right, Put put) {
  multiply(s.tokens, x, SUMMED, right.sum, right, put);
}

// y (P, columns) = x (P, sum) x right + bias, where there is one
template <typename T> void multiply_to(const Shape& s, const T* x, const Right<T>& right, const float* bias, T* y) {
  multiply_rows(s, x, right, [&](int64_t row, int64_t column, int64_t columns, const float* sums) {
    T* to = y + row * right.columns + column;
    if (bias) {
      const float* more = bias + column;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) store(to[i], sums[i] + more[i]);
    } else {
      write_row(sums, columns, to);
    }
  });
}

// total (T, columns) = x (T, columns) + left (P, sum) x right + bias
template <typename T>
void multiply_add(const Shape& s, const T* left, const Right<T>& right, const float* bias, const float* x, float* total) {
  multiply_rows(s, left, right, [&](int64_t row, int64_t column, int64_t columns, const float* sums) {
    const float* from = x + row * right.columns + column;
    float* to = total + row * right.columns + column;
    if (bias) {
      const float* more = bias + column;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) to[i] = from[i] + sums[i] + more[i];
    } else {
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) to[i] = from[i] + sums[i];
    }
  });
}

// a weight (out, in) as the right side of x weight^T
template <typename T> Right<T> forward_right(Workspace& own, const float* weight, int64_t outputs, int64_t inputs) {
  T *rounded = own.take<T>(outputs * inputs), *tiles = own.take<T>(outputs * inputs);
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < outputs; first += COLUMNS) {
    const int64_t columns = std::min(COLUMNS, outputs - first);
    T* from = rounded + first * inputs;
    write_row(weight + first * inputs, columns * inputs, from);
    turn(from, columns, inputs, tiles + first * inputs);
  }
  return {tiles, inputs, outputs};
}

inline uint32_t bits(float x) { return half_bits(x); }
inline uint32_t bits(BFloat16 x) { return x.x; }

// rows (rows, all) from column `first` on -> a tile of `columns` columns, with rows as its sum
template <typename T, typename From>
void pair_rows(const From* x, int64_t rows, int64_t all, int64_t first, int64_t columns, T* tile) {
  for (int64_t row = 0; row < rows; row += PAIR<T>) {
    const From *a = x + row * all + first, *b = a + all;
    if constexpr (PAIR<T> == 1) {
      std::copy_n(a, columns, tile + row * columns);
    } else {
      uint32_t* pairs = reinterpret_cast<uint32_t*>(tile + row * columns);
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) pairs[i] = bits(a[i]) | bits(b[i]) << 16;
    }
  }
}

// x (rows, columns), a weight or tokens' rows, as the right side of products with rows as their sum
template <typename T, typename From> Right<T> right_of(Workspace& own, const From* x, int64_t rows, int64_t columns) {
  T* tiles = own.take<T>(rows * columns);
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < columns; first += COLUMNS)
    pair_rows(x, rows, columns, first, std::min(COLUMNS, columns - first), tiles + first * rows);
  return {tiles, rows, columns};
}

inline void put_or_add(const float* x, int64_t count, bool adds, float* to) {
  if (!adds) {
    std::copy_n(x, count, to);
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] += x[i];
}

// to[column] = the sum over tokens of value(row, column), or so much more
template <typename Value> void sum_tokens(const Shape& s, int64_t width, bool adds, float* to, Value value) {
  if (!to) return;
  constexpr int64_t TOGETHER = 64;
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < width; first += TOGETHER) {
    const int64_t columns = std::min(TOGETHER, width - first);
    float sums[TOGETHER] = {};
    for (int64_t row = 0; row < s.tokens; ++row)
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) sums[i] += value(row, first + i);
    put_or_add(sums, columns, adds, to + first);
  }
}

// y (P, out) = x (P, in) weight^T + bias
template <typename T>
void apply(const Shape& s, Workspace own, const Linear& linear, int64_t outputs, int64_t inputs, const T* x, T* y) {
  OF_CLASS("products");
  multiply_to(s, x, forward_right<T>(own, linear.weight, outputs, inputs), linear.bias, y);
}

// total (T, out) = x (T, out) + the same of read (P, in)
template <typename T>
void apply_to(const Shape& s, Workspace own, const Linear& linear, int64_t outputs, int64_t inputs, const T* read,
              const float* x, float* total) {
  OF_CLASS("products");
  multiply_add(s, read, forward_right<T>(own, linear.weight, outputs, inputs), linear.bias, x, total);
}

// dx (P, in) = dy (P, out) weight
template <typename T>
void apply_back(const Shape& s, Workspace own, const Linear& linear, int64_t outputs, int64_t inputs, const T* dy, T* dx) {
  OF_CLASS("products");
  multiply_to(s, dy, right_of<T>(own, linear.weight, outputs, inputs), nullptr, dx);
}

// the gradients of a linear from dy (P, out) and what it read: x (P, in), or n w + b of the norm's n where `norm` is given
template <typename T>
void gradients_of(const Shape& s, Workspace own, const T* dy, int64_t outputs, const T* x, int64_t inputs, const Norm* norm,
                  const LinearGradients& to) {
  OF_CLASS("products");
  const int64_t tokens = s.filled_tokens();
  T* turned = own.take<T>(tokens * filled(outputs));     // (out, tokens) of TOKENS after TOKENS
  float* sums = to.bias || (norm && norm->bias) ? own.take<float>(outputs) : nullptr;
  sum_tokens(s, outputs, false, sums, [&](int64_t row, int64_t column) { return float(dy[row * outputs + column]); });
  if (to.bias) put_or_add(sums, outputs, s.adds, to.bias);
  T* pairs = own.take<T>(tokens * outputs);
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < tokens; first += TOKENS)
    transpose(dy + first * outputs, std::min(TOKENS, tokens - first), outputs, pairs + first * outputs,
              turned + first * filled(outputs));
  multiply(outputs, turned, TOKENS, 0, right_of<T>(own, x, tokens, inputs),
           [&](int64_t row, int64_t column, int64_t columns, const float* made) {
    float* gradient = to.weight + row * inputs + column;
    if (!norm) return put_or_add(made, columns, s.adds, gradient);
    const float *weight = norm->weight + column, *bias = norm->bias ? norm->bias + column : nullptr;
    const float more = bias ? sums[row] : 0.f;
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i)
      gradient[i] = (s.adds ? gradient[i] : 0.f) + made[i] * weight[i] + (bias ? more * bias[i] : 0.f);
  });
}

template <typename T> void norm_gradients(const Shape& s, const T* dh, const T* n, const LinearGradients& to) {
  const auto at = [&](const T* x, int64_t row, int64_t column) { return float(x[row * s.width + column]); };
  sum_tokens(s, s.width, s.adds, to.weight,
             [&](int64_t row, int64_t column) { return at(dh, row, column) * at(n, row, column); });
  sum_tokens(s, s.width, s.adds, to.bias, [&](int64_t row, int64_t column) { return at(dh, row, column); });
}

// ---------------------------------------------------------------------------------------------- the block

inline Problem problem_of(const Shape& s) {
  const int64_t all = s.all_heads();
  return {s.heads, s.kv_heads, s.head_width, s.documents, s.starts, s.order, all, all, all, all, all, s.window, s.scale, 0.f, 0};
}
inline Heads heads_of(const Shape& s) {
  return {s.tokens, s.heads, s.kv_heads, s.head_width, s.rotary_width, s.cosines, s.sines, nullptr, nullptr, 0.f};
}
template <typename T> int attend(const Shape& s, const T* heads, T* mixed, float* sums) {
  OF_CLASS("attention");
  const T *k = heads + s.mixed(), *v = k + s.kv_heads * s.head_width;
  return forward(problem_of(s), heads, k, v, mixed, sums);
}
template <typename T> int attend_back(const Shape& s, const Saved<T>& saved, const T* dmixed, T* dheads) {
  OF_CLASS("attention");
  const int64_t keys = s.mixed(), values = keys + s.kv_heads * s.head_width;
  const T* heads = saved.heads;
  return backward<T>(problem_of(s), dmixed, heads, heads + keys, heads + values, saved.mixed, saved.sums, dheads, dheads + keys,
                     dheads + values);
}
template <typename T> void activated(const Shape& s, const T* inner, T* out) {
  with_activation(s.activation, [&](auto kind) {
    if (s.gated) activate<decltype(kind), true>(s.tokens, s.mlp_width, raw(inner), raw(out));
    else activate<decltype(kind), false>(s.tokens, s.mlp_width, raw(inner), raw(out));
  });
}
template <typename T> void activated_back(const Shape& s, const T* inner, const T* dout, T* out, T* dinner) {
  with_activation(s.activation, [&](auto kind) {
    if (s.gated) activate_back<decltype(kind), true>(s.tokens, s.mlp_width, raw(inner), raw(dout), raw(out), raw(dinner));
    else activate_back<decltype(kind), false>(s.tokens, s.mlp_width, raw(inner), raw(dout), raw(out), raw(dinner));
  });
}

// out (T, d): the next block's residual, from this one's x, which it may replace
template <typename T>
int block_forward(const Shape& s, const Weights& w, const float* x, float* out, T* numbers, float* statistics,
                  Workspace own) {
  const Saved<T> saved(s, numbers, statistics);
  for (auto [rows, width] : {std::pair(saved.n_attention, s.width), {saved.mixed, s.mixed()}, {saved.n_mlp, s.width}})
    zeroed_behind(s, rows, width);
  T *h = take<T>(own, s, s.width), *act = take<T>(own, s, s.mlp_width);
  normalise<Number<T>>(s.tokens, s.width, x, nullptr, w.attention_norm, nullptr, raw(saved.n_attention), raw(h),
                       saved.rates_attention);
  apply(s, own, w.qkv, s.all_heads(), s.width, h, saved.heads);
  if (s.rotary_width) position_heads(heads_of(s), raw(saved.heads), raw(saved.heads));
  if (const int failed = attend(s, saved.heads, saved.mixed, saved.sums)) return failed;
  apply_to(s, own, w.out, s.width, s.mixed(), saved.mixed, x, out);
  normalise<Number<T>>(s.tokens, s.width, out, nullptr, w.mlp_norm, nullptr, raw(saved.n_mlp), raw(h), saved.rates_mlp);
  apply(s, own, w.mlp_in, s.inner(), s.width, h, saved.inner);
  activated(s, saved.inner, act);
  apply_to(s, own, w.mlp_out, s.width, s.mlp_width, act, out, out);
  return 0;
}

// dx (T, d) and the weights' gradients from that of `out`, given (T, d), which dx may replace
template <typename T>
int block_backward(const Shape& s, const Weights& w, const float* given, float* dx, T* numbers, float* statistics,
                   Workspace own, const Gradients& to) {
  const Saved<T> saved(s, numbers, statistics);
  T *dy = take<T>(own, s, s.width), *act = take<T>(own, s, s.mlp_width), *dact = take<T>(own, s, s.mlp_width);
  T *dinner = take<T>(own, s, s.inner()), *dh = take<T>(own, s, s.width), *dmixed = take<T>(own, s, s.mixed());
  T* dheads = take<T>(own, s, s.all_heads());
  float* between = own.take<float>(s.tokens * s.width);
  const auto rounded = [&](const float* from) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < s.tokens; ++row) write_row(from + row * s.width, s.width, dy + row * s.width);
  };
  rounded(given);
  apply_back(s, own, w.mlp_out, s.width, s.mlp_width, dy, dact);
  activated_back(s, saved.inner, dact, act, dinner);
  gradients_of<T>(s, own, dy, s.width, act, s.mlp_width, nullptr, to.mlp_out);
  apply_back(s, own, w.mlp_in, s.inner(), s.width, dinner, dh);
  gradients_of(s, own, dinner, s.inner(), saved.n_mlp, s.width, &w.mlp_norm, to.mlp_in);
  norm_gradients(s, dh, saved.n_mlp, to.mlp_norm);
  normalise_back(s.tokens, s.width, raw(dh), raw(saved.n_mlp), saved.rates_mlp, w.mlp_norm, given, between);
  rounded(between);
  apply_back(s, own, w.out, s.width, s.mixed(), dy, dmixed);
  gradients_of<T>(s, own, dy, s.width, saved.mixed, s.mixed(), nullptr, to.out);
  if (const int failed = attend_back(s, saved, dmixed, dheads)) return failed;
  if (s.rotary_width) {
    T *dk = dheads + s.mixed(), *dv = dk + s.kv_heads * s.head_width;
    position_heads_back<Number<T>>(heads_of(s), raw(dheads), s.all_heads(), raw(dk), raw(dv), s.all_heads(), nullptr, 0,
                                   raw(dheads), nullptr, omp_get_max_threads());
  }
  apply_back(s, own, w.qkv, s.all_heads(), s.width, dheads, dh);
  gradients_of(s, own, dheads, s.all_heads(), saved.n_attention, s.width, &w.attention_norm, to.qkv);
  norm_gradients(s, dh, saved.n_attention, to.attention_norm);
  normalise_back(s.tokens, s.width, raw(dh), raw(saved.n_attention), saved.rates_attention, w.attention_norm, between, dx);
  return 0;
}

}  // namespace
