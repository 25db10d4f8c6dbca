/* Vectors of the width that the processor has, and the layout of weights that stream.

   A panel is 16 rows of a weight side by side: a vector's lanes are rows, so that no sum crosses lanes. Along the columns a panel is cut
   into blocks of 32. Blocks of one panel follow each other, panels too; all begin at multiples of 64 bytes.

     int4   [4 lines][16 rows] words, [16] scales, [16] minima   320 bytes   word of line l and row r: columns 8 l .. 8 l + 7; byte j holds
                                                                             column j in its low half and column 4 + j in its high one
     int8   [8 lines][16 rows] words, of all blocks; then [16] scales of each block, up to a multiple of 64 bytes
                                                                             word of line l: columns 4 l .. 4 l + 3, one signed byte each
     bf16   [16 lines][16 rows] words                            1,024 bytes word of line l: column 2 l low, 2 l + 1 high

   Scales and minima are IEEE half floats. A weight is scale * q + minimum (int4, q 0 .. 15) or scale * q (int8, q -127 .. 127). */
#ifndef HEXRT_LANES_H
#define HEXRT_LANES_H

#include <stdint.h>

#include "matmul.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#else
#define LANES 8
#endif
#define PARTS (PANEL / LANES)

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef float vfu __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t vuu __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t vhu __attribute__((vector_size(LANES * 2), aligned(2)));

HX_INLINE vf load(const float *at) { return *(const vfu *)at; }
HX_INLINE void store(float *at, vf value) { *(vfu *)at = value; }
HX_INLINE vu words(const uint32_t *at) { return *(const vuu *)at; }
HX_INLINE vf splat(float value) { return value - (vf){0}; }

/* Half floats of LANES rows, as floats. Infinities and NaN never are scales. */
HX_INLINE vf halves(const uint16_t *at) {
#if LANES == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#else
    vu bits = __builtin_convertvector(*(const vhu *)at, vu);
    vf size = (vf)((bits & 0x7fffu) << 13) * 0x1p112f;
    return (vf)((vu)size | (bits & 0x8000u) << 16);
#endif
}

/* Byte j of each word: unsigned in the low byte, or signed in the high one, 2^24 times itself; the other bytes are 0. */
#if defined(__AVX2__)
#define AT(word, at, j) (int)((0x80808080u & ~(0xffu << 8 * (at))) | (unsigned)(4 * (word) + (j)) << 8 * (at))
#if LANES == 16
#define PICK(value, at, j)                                                                                             \
    (vi)_mm512_shuffle_epi8((__m512i)(value), _mm512_broadcast_i32x4(_mm_setr_epi32(AT(0, at, j), AT(1, at, j), AT(2, at, j), AT(3, at, j))))
#else
#define PICK(value, at, j)                                                                                             \
    (vi)_mm256_shuffle_epi8((__m256i)(value), _mm256_setr_epi32(AT(0, at, j), AT(1, at, j), AT(2, at, j), AT(3, at, j), \
                                                                AT(0, at, j), AT(1, at, j), AT(2, at, j), AT(3, at, j)))
#endif
HX_INLINE vi low_byte(vu value, const int j) { return j == 0 ? (vi)(value & 0xffu) : j == 3 ? (vi)(value >> 24) : PICK(value, 0, j); }
HX_INLINE vi high_byte(vu value, const int j) { return j == 0 ? (vi)(value << 24) : j == 3 ? (vi)(value & 0xff000000u) : PICK(value, 3, j); }
#else
HX_INLINE vi low_byte(vu value, const int j) { return (vi)(value >> (8 * j) & 0xffu); }
HX_INLINE vi high_byte(vu value, const int j) { return (vi)(value << (24 - 8 * j) & 0xff000000u); }
#endif

#endif
