// Types, warp primitives and the one decoder that every kernel of this package uses.
//
// No header is included: NVRTC then needs no include path, and the source text alone decides what is compiled.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

// A tile of codes is 16 rows x 32 columns, 512 bytes, 16 per lane (blocks.py has the byte order).
constexpr int TILE_BYTES = 512;
constexpr u32 SIGNS = 0x80008000u;

DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE int warp_id() { return threadIdx.x >> 5; }

// ---- programmatic dependent launch ----------------------------------------------------------------------------------
// A kernel may read weights before the kernel in front of it has finished, because nothing in front writes weights (the
// proof is read back on the host before a twin is ever served); it may read activations and write results only after.
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- memory ---------------------------------------------------------------------------------------------------------
// Codes are read once per layer and step: keep them out of L1, which the activations want. Not `.nc`: ptxas moves
// read-only loads below griddepcontrol.wait, and the early start is lost (seen in SASS; 5.9 instead of 5.0 us per layer
// on an H200).
DEVICE uint4 load_stream(const void *p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
DEVICE u32 smem_address(const void *p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// 16 bytes global -> shared without a register; zeros are written instead when `valid` is false.
DEVICE void copy_async_16(u32 dst, const void *src, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- decoding -------------------------------------------------------------------------------------------------------
// The bits of an e4m3 byte, put at a bf16's sign, low exponent and high fraction bits, are that value times 2**-120,
// its subnormals included. One multiplication by 2**(exponent - 127 + 120) therefore gives the weight, rounded to
// nearest even once, for every exponent byte up to 134. Above, that factor is no finite bf16 and it takes two
// multiplications
// (`wide`): by 2**120, which is exact, and by 2**(exponent - 127). Real checkpoints use 115..126.
constexpr u32 MAX_NARROW_EXPONENT = 134;

// Whether one of four exponent bytes needs two multiplications.
DEVICE bool exceeds_narrow(u32 bytes) {
    return __vmaxu4(bytes, MAX_NARROW_EXPONENT * 0x01010101u) != MAX_NARROW_EXPONENT * 0x01010101u;
}

DEVICE u32 mul_bf16x2(u32 a, u32 b) {
    u32 d;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
    // Adding -0.0 keeps the sign of a zero product.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(SIGNS));
#endif
    return d;
}

// Both halves 2**(exponent - 7): what narrow decoding multiplies by.
DEVICE u32 narrow_factor(u32 exponent) { return ((exponent + 120u) << 7) * 0x00010001u; }
// Both halves 2**(exponent - 127); byte 0 is the subnormal 2**-127, byte 255 is NaN.
DEVICE u32 wide_factor(u32 exponent) {
    u32 half = exponent == 0 ? 0x0040u : exponent == 255 ? 0x7fc0u : exponent << 7;
    return half * 0x00010001u;
}
template <bool WIDE> DEVICE u32 decode_factor(u32 exponent) {
    return WIDE ? wide_factor(exponent) : narrow_factor(exponent);
}
template <bool WIDE> DEVICE u32 scale_pair(u32 bits, u32 factor) {
    constexpr u32 TWO_TO_120 = 0x7b807b80u;
    return mul_bf16x2(WIDE ? mul_bf16x2(bits, TWO_TO_120) : bits, factor);
}

// The bytes `SELECTOR` names, each with its sign above it (prmt's sign mode), shifted to a bf16's place: 3 instructions
// for two codes.
template <u32 SELECTOR> DEVICE u32 place_codes(u32 word) {
    u32 extended;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(extended) : "r"(word), "n"(SELECTOR));
    return extended << 4 & 0x87f087f0u;
}
// A word of a tile -> two bf16 of the lane's upper row (g) and two of its lower row (g + 8).
template <bool WIDE> DEVICE void decode_word(u32 word, u32 factor, u32 &upper, u32 &lower) {
    upper = scale_pair<WIDE>(place_codes<0xa280>(word), factor);
    lower = scale_pair<WIDE>(place_codes<0xb391>(word), factor);
}

// Whether a word holds the byte 0x7f or 0xff, e4m3's NaN.
DEVICE bool has_nan_code(u32 word) { return (((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0; }

// Like decode_word, for kernels that must also report what serving never meets: NaN codes decode to NaN.
DEVICE void decode_word_checked(u32 word, u32 exponent, u32 &upper, u32 &lower) {
    if (exponent <= MAX_NARROW_EXPONENT) decode_word<false>(word, narrow_factor(exponent), upper, lower);
    else decode_word<true>(word, wide_factor(exponent), upper, lower);
    if (has_nan_code(word) || exponent == 255) {
        u32 bytes_upper = word & 0x00ff00ffu, bytes_lower = (word >> 8) & 0x00ff00ffu;
        for (int half = 0; half < 32; half += 16) {
            u32 up = (bytes_upper >> half) & 0xffu, low = (bytes_lower >> half) & 0xffu;
            if ((up & 0x7fu) == 0x7fu || exponent == 255)
                upper = (upper & ~(0xffffu << half)) | ((0x7fc0u | (up & 0x80u) << 8) << half);
            if ((low & 0x7fu) == 0x7fu || exponent == 255)
                lower = (lower & ~(0xffffu << half)) | ((0x7fc0u | (low & 0x80u) << 8) << half);
        }
    }
}

// ---- layout ---------------------------------------------------------------------------------------------------------
// Word i of lane t (of a quad) becomes word t of lane i: from MMA order, where a quad shares each 8 columns, to 8
// columns in a row per lane. Its own inverse.
DEVICE void transpose_quad(uint4 &v) {
    bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    u32 a = odd ? v.x : v.y, b = odd ? v.z : v.w;
    a = __shfl_xor_sync(~0u, a, 1);
    b = __shfl_xor_sync(~0u, b, 1);
    if (odd) {
        v.x = a;
        v.z = b;
    } else {
        v.y = a;
        v.w = b;
    }
    a = upper ? v.x : v.z, b = upper ? v.y : v.w;
    a = __shfl_xor_sync(~0u, a, 2);
    b = __shfl_xor_sync(~0u, b, 2);
    if (upper) {
        v.x = a;
        v.y = b;
    } else {
        v.z = a;
        v.w = b;
    }
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------
DEVICE u16 round_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE u32 round_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
DEVICE float low_half(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

DEVICE void mma_m16n8k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void load_matrices(u32 (&b)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address));
}
