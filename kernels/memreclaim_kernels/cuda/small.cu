// 1..8 rows: one block per 16 rows of the weight, one warp per eighth of K.
//
// Every warp issues all its 16-byte loads of codes at once, so that 8.4 MB are in flight over the chip before the first
// is needed; the weight is the A operand of mma.sync straight from registers. The partial sums of the 8 warps meet in
// shared memory. Order of sums, which is SGLang's at 2..8 rows: ascending k16 steps inside each of 8 splits of K, one
// fp32 accumulator per output, then (((p0+p2)+p4)+p6) + (((p1+p3)+p5)+p7), then bf16.
//
// EPILOGUE 0 stores bf16 [T, G, R]. EPILOGUE 1 stores MXFP8: the bf16 value quantised per 32 output columns
// (mxfp8.cuh).
#include "common.cuh"
#include "mxfp8.cuh"

#ifndef DEPTH
#define DEPTH 4096
#endif
#ifndef EPILOGUE
#define EPILOGUE 0
#endif

constexpr int WARPS = 8, ROWS = 8;
constexpr int SPLIT = DEPTH / WARPS, TILES = SPLIT / 32;
static_assert(TILES % 4 == 0, "four exponents are read as one word");
constexpr int PITCH = SPLIT * 2 + 16;       // 16 bytes over a multiple of 128: ldmatrix then meets no bank twice
constexpr int ROW_TILES = EPILOGUE ? 2 : 1; // 32 output columns share an MXFP8 scale

// Sum of this warp's K-eighth for 16 weight rows and 8 tokens.
template <bool WIDE>
DEVICE void multiply(float (&c)[4], const uint4 (&codes)[TILES], const u32 (&scale)[TILES / 4], u32 activations) {
    int lane = lane_id();
    // Lanes 0..7 address k8 block 0 of the 8 tokens, 8..15 block 1, and so on: one ldmatrix feeds two k16 steps.
    u32 address = activations + (lane & 7) * PITCH + (lane >> 3) * 16;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        u32 factor = decode_factor<WIDE>(scale[i / 4] >> i % 4 * 8 & 255u), b[4], a[8];
        load_matrices(b, address + i * 64);
        decode_word<WIDE>(codes[i].x, factor, a[0], a[1]);
        decode_word<WIDE>(codes[i].y, factor, a[2], a[3]);
        decode_word<WIDE>(codes[i].z, factor, a[4], a[5]);
        decode_word<WIDE>(codes[i].w, factor, a[6], a[7]);
        mma_m16n8k16(c, a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_m16n8k16(c, a[4], a[5], a[6], a[7], b[2], b[3]);
    }
}

DEVICE float sum_splits(const float *p, int stride) {
    float even = ((p[0] + p[2 * stride]) + p[4 * stride]) + p[6 * stride];
    float odd = ((p[stride] + p[3 * stride]) + p[5 * stride]) + p[7 * stride];
    return even + odd;
}

// Grid (R / 16 / ROW_TILES, G), 256 threads. o: bf16 [rows, G, DEPTH] with strides in elements.
extern "C" __global__ void __launch_bounds__(WARPS * 32 * ROW_TILES, EPILOGUE ? 1 : 2)
    small(const u16 *o, long long row_stride, long long group_stride, const u8 *codes, const u8 *exponents, void *out,
          u8 *scales, int rows, int rank) {
    extern __shared__ __align__(16) u8 shared[];
    int lane = lane_id(), warp = warp_id() % WARPS, sub = warp_id() / WARPS;
    int tile = blockIdx.x * ROW_TILES + sub, group = blockIdx.y, groups = gridDim.y;

    const u8 *src =
        codes + ((static_cast<long long>(group) * (rank / 16) + tile) * (DEPTH / 32) + warp * TILES) * TILE_BYTES;
    uint4 words[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) words[i] = load_stream(src + i * TILE_BYTES + lane * 16);
    const u8 *block =
        exponents + (static_cast<long long>(group) * (rank / 32) + tile / 2) * (DEPTH / 32) + warp * TILES;
    u32 scale[TILES / 4];
    bool wide = false;
#pragma unroll
    for (int i = 0; i < TILES / 4; ++i) {
        scale[i] = reinterpret_cast<const u32 *>(block)[i];
        wide |= exceeds_narrow(scale[i]);
    }

    wait_for_previous_kernel();
    // Each warp stages the activations of its own K-eighth, so no block barrier stands before the products.
    u8 *stage = shared + warp * ROWS * PITCH;
    constexpr int CHUNKS = SPLIT / 8;
    if (sub == 0) {
#pragma unroll
        for (int i = 0; i < ROWS * CHUNKS / 32; ++i) {
            int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
            const u16 *from = o + (row < rows ? row : 0) * row_stride + group * group_stride + warp * SPLIT + chunk * 8;
            copy_async_16(smem_address(stage + row * PITCH + chunk * 16), from, row < rows);
        }
        copy_async_commit();
        copy_async_wait<0>();
    }
    if (ROW_TILES > 1) __syncthreads();
    else __syncwarp();

    // Not earlier: the next kernel's codes would queue in front of this one's activations (4.0 against 3.7 us at 1
    // row, 5.4 against 4.9 at 8). Not later: they then arrive too late (4.2 and 6.3).
    let_next_kernel_start();
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    if (wide) multiply<true>(c, words, scale, smem_address(stage));
    else multiply<false>(c, words, scale, smem_address(stage));

    // [split][token][row of the block]: sums are read along rows.
    constexpr int OUT_ROWS = 16 * ROW_TILES;
    float *partial = reinterpret_cast<float *>(shared + WARPS * ROWS * PITCH);
    int row = sub * 16 + lane / 4, token = lane % 4 * 2;
    float *mine = partial + warp * ROWS * OUT_ROWS;
    mine[token * OUT_ROWS + row] = c[0];
    mine[(token + 1) * OUT_ROWS + row] = c[1];
    mine[token * OUT_ROWS + row + 8] = c[2];
    mine[(token + 1) * OUT_ROWS + row + 8] = c[3];
    __syncthreads();
    int index = threadIdx.x;
    if (index >= ROWS * OUT_ROWS) return;
    token = index / OUT_ROWS, row = index % OUT_ROWS;
    u16 value = round_bf16(sum_splits(partial + index, ROWS * OUT_ROWS));
#if EPILOGUE == 0
    if (token < rows)
        static_cast<u16 *>(out)[(static_cast<long long>(token) * groups + group) * rank + blockIdx.x * 16 + row] =
            value;
#else
    // One warp per token: its 32 lanes are the 32 columns that share a scale.
    int column_block = (group * rank + blockIdx.x * 32) / 32;
    store_mxfp8(static_cast<u8 *>(out), scales, token, rows, column_block, groups * rank, low_half(value));
#endif
}
