/* Vectors of VW floats for the level that is compiled, written with the compiler's vector types; and numbers as pages and activations
   hold them (float32, bfloat16, IEEE half), which are computed with in float32. */
#ifndef HEXRT_VECTOR_H
#define HEXRT_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(HX_WIDTH) /* any width, by the compiler's means alone: for tests of widths that a processor has not */
#define VW HX_WIDTH
#define MANY_REGISTERS (HX_WIDTH == 16)
#elif defined(__AVX512F__)
#define VW 16
#define MANY_REGISTERS 1
#elif defined(__AVX2__)
#define VW 8
#define MANY_REGISTERS 0
#else
#define VW 4
#ifdef __aarch64__
#define MANY_REGISTERS 1
#else
#define MANY_REGISTERS 0
#endif
#endif
#if VW == 16 && defined(__AVX512F__)
#define HX_512 1
#elif VW == 8 && defined(__AVX2__) && defined(__F16C__)
#define HX_256 1
#elif VW == 4 && defined(__aarch64__)
#define HX_NEON 1
#endif

#ifndef HX_INLINE
#define HX_INLINE static inline __attribute__((always_inline))
#endif

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef float vf_any __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));
typedef uint16_t vh_any __attribute__((vector_size(VW * 2), aligned(2), may_alias));

enum { HX_F32 = 0, HX_BF16 = 1, HX_F16 = 2 };

HX_INLINE int64_t hx_item_bytes(int type) { return type == HX_F32 ? 4 : 2; }

HX_INLINE vf hx_all(float x) { return x - (vf){0}; } /* not 0 + x, which is another number for -0 and costs an addition */

HX_INLINE vf hx_select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* Where one is no number, it may give either. */
HX_INLINE vf hx_max(vf a, vf b) {
#if defined(HX_512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(HX_256)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return hx_select(a > b, a, b);
#endif
}

HX_INLINE vu hx_wide(vh h) {
#if defined(HX_512)
    return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(HX_256)
    return (vu)_mm256_cvtepu16_epi32((__m128i)h); /* the compiler's own conversion goes by halves */
#else
    return __builtin_convertvector(h, vu);
#endif
}

HX_INLINE vf hx_half_to_float(vh h) {
#if defined(HX_512)
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(HX_256)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#elif defined(HX_NEON)
    return (vf)vcvt_f32_f16((float16x4_t)h);
#else
    const vu wide = hx_wide(h), size = wide & 0x7fff;
    const vf number = (vf)(size << 13) * 0x1p112f; /* the exponent's other bias; right for subnormals too */
    const vi special = (vi)(size >= 0x7c00);
    const vu bits = (vu)hx_select(special, (vf)((size << 13) | 0x7f800000u), number);
    return (vf)(bits | ((wide & 0x8000) << 16));
#endif
}

HX_INLINE vh hx_float_to_half(vf x) {
#if defined(HX_512)
    return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(HX_256)
    return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(HX_NEON)
    return (vh)vcvt_f16_f32((float32x4_t)x);
#else
    const vu bits = (vu)x, size = bits & 0x7fffffffu;
    const vu normal = (size + 0xfff + ((size >> 13) & 1) - 0x38000000u) >> 13;
    const vu small = (vu)((vf)size + 0.5f) - 0x3f000000u; /* 0.5's last bit is worth a half's smallest number */
    const vu none = (vu){0};
    vu half = (vu)hx_select((vi)(size < 0x38800000u), (vf)small, (vf)normal);
    half = (vu)hx_select((vi)(size >= 0x47800000u), (vf)(none + 0x7c00), (vf)half);
    half = (vu)hx_select((vi)(size > 0x7f800000u), (vf)(none + 0x7e00), (vf)half);
    return __builtin_convertvector(half | ((bits >> 16) & 0x8000), vh);
#endif
}

/* VW numbers of `type` from `at`, which need not be aligned. */
HX_INLINE vf hx_load(const void *at, int type) {
    if (type == HX_F32)
        return (vf)*(const vf_any *)at;
    const vh half = (vh)*(const vh_any *)at;
    if (type == HX_BF16)
        return (vf)(hx_wide(half) << 16);
    return hx_half_to_float(half);
}

/* Rounds to the nearest, ties to even, as torch does. */
HX_INLINE void hx_store(void *at, vf x, int type) {
    if (type == HX_F32) {
        *(vf_any *)at = (vf_any)x;
    } else if (type == HX_BF16) {
        const vu bits = (vu)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const vu whole = (vu)hx_select((vi)(x == x), (vf)rounded, (vf)((vu){0} + 0x7fc0));
        *(vh_any *)at = (vh_any)__builtin_convertvector(whole, vh);
    } else {
        *(vh_any *)at = (vh_any)hx_float_to_half(x);
    }
}

/* The first `count` < VW of them; the others are 0 and are not touched in memory. */
HX_INLINE vf hx_load_some(const void *at, int count, int type) {
    char bytes[VW * 4] = {0};
    memcpy(bytes, at, (size_t)(count * hx_item_bytes(type)));
    return hx_load(bytes, type);
}

HX_INLINE void hx_store_some(void *at, vf x, int count, int type) {
    char bytes[VW * 4];
    hx_store(bytes, x, type);
    memcpy(at, bytes, (size_t)(count * hx_item_bytes(type)));
}

/* e^x to 2 units in the last place for x <= 88; 0 below -87; what is no number stays none. */
HX_INLINE vf hx_exp(vf x) {
    const vf shifted = x * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: the low bits are the nearest integer */
    const vf n = shifted - 12582912.0f;
    const vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
    vf p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const vf y = (vf)((vi)p + ((vi)shifted << 23));
    return hx_select((vi)(x < -87.0f), (vf){0}, hx_select((vi)(x == x), y, x));
}

HX_INLINE vf hx_tanh(vf x) {
    const vf size = (vf)((vi)x & 0x7fffffff), square = x * x;
    vf near = square * (62.0f / 2835) - (17.0f / 315); /* Taylor: enough below 1/4 */
    near = near * square + (2.0f / 15);
    near = near * square - (1.0f / 3);
    near = near * square * size + size;
    const vf capped = hx_select((vi)(size > 10.0f), hx_all(10.0f), size);
    const vf far = 1.0f - 2.0f / (hx_exp(capped + capped) + 1.0f);
    const vf y = hx_select((vi)(size < 0.25f), near, far);
    return (vf)((vi)y | ((vi)x & (int32_t)0x80000000));
}

HX_INLINE float hx_sum(vf x) {
    float total = x[0];
    for (int i = 1; i < VW; i++)
        total += x[i];
    return total;
}

HX_INLINE float hx_most(vf x) {
    float most = x[0];
    for (int i = 1; i < VW; i++)
        most = x[i] > most ? x[i] : most;
    return most;
}

/* The sums of four vectors, one after the other at `out`. */
HX_INLINE void hx_sum4(vf a, vf b, vf c, vf d, float *out) {
#if defined(HX_512) || defined(HX_256)
#if defined(HX_512)
#define HALVED(x) _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1))
#else
#define HALVED(x) ((__m256)x)
#endif
    const __m256 ab = _mm256_hadd_ps(HALVED(a), HALVED(b)), cd = _mm256_hadd_ps(HALVED(c), HALVED(d));
    const __m256 all = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#undef HALVED
#elif defined(HX_NEON)
    vst1q_f32(out, vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d)));
#else
    out[0] = hx_sum(a), out[1] = hx_sum(b), out[2] = hx_sum(c), out[3] = hx_sum(d);
#endif
}

#endif
