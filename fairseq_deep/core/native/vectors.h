// Vectors of the processor, by the extensions of GCC and Clang: 16 floats with AVX-512, 8 with AVX2.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WIDE 1
constexpr int LANES = 16;
#else
#define WIDE 0
constexpr int LANES = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float LooseVec __attribute__((vector_size(4 * LANES), aligned(4)));  // at any address of a float
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef int32_t LooseIntVec __attribute__((vector_size(4 * LANES), aligned(4)));

static inline Vec load(const float* from) { return *(const LooseVec*)from; }
static inline void store(float* to, Vec value) { *(LooseVec*)to = value; }
static inline Vec spread(float value) { return value - Vec{}; }

// The first `count` floats, and zeros; nothing behind them is touched.
static inline Vec load_part(const float* from, int count) {
#if WIDE
    return (Vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
    Vec value = {};
    memcpy(&value, from, 4 * count);
    return value;
#endif
}

static inline void store_part(float* to, Vec value, int count) { memcpy(to, &value, 4 * count); }

static inline Vec load_up_to(const float* from, int64_t count) {
    return count >= LANES ? load(from) : load_part(from, (int)count);
}

static inline void store_up_to(float* to, Vec value, int64_t count) {
    if (count >= LANES)
        store(to, value);
    else
        store_part(to, value, (int)count);
}

static inline float sum(Vec value) {
#if WIDE
    return _mm512_reduce_add_ps((__m512)value);
#else
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#endif
}

static inline bool any_larger(Vec a, Vec b) {
#if WIDE
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ));
#endif
}

static inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
static inline Vec magnitude(Vec a) { return (Vec)((IntVec)a & 0x7fffffff); }

constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: added to a small number, it leaves the nearest whole one

// e^x to the last bits of fp32, 0 below -87, NaN of NaN. Cody and Waite: x = n log 2 + r, e^x = 2^n e^r.
static inline Vec exponential(Vec x) {
    const Vec low = spread(-87.0f), high = spread(88.0f);
    IntVec vanishes = x < low;
    Vec bounded = x > high ? high : (vanishes ? low : x);
    Vec shifted = bounded * 1.44269504f + ROUNDING;
    Vec whole = shifted - ROUNDING;
    Vec rest = bounded - whole * 0.693359375f;
    rest -= whole * -2.12194440e-4f;
    Vec series = spread(1.9875691500e-4f);
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    IntVec power = ((IntVec)shifted - (IntVec)spread(ROUNDING) + 127) << 23;
    return vanishes ? Vec{} : series * (Vec)power;
}

static inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-x)); }
