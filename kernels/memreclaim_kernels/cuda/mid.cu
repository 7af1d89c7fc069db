// 1..64 rows in cuBLAS's order of sums: one ascending chain of k16 steps over all of K for each output.
//
// A block is 16 rows of the weight and all tokens, so that every code is read and decoded once on the chip. Eight warps take
// the block's 64 KiB of codes to registers (one column tile in eight each), decode them to bf16 and lay them down in a ring
// of shared memory; one warpgroup multiplies (wgmma with the tokens as M = 64 and the weight rows as N = 16); one warp fetches
// activations. A chain of 256 such wgmma takes 20.6 cycles a step (measured, H200), 2.7 us; chains of mma.sync take 25.
//
// The blocks of a cluster (CLUSTER in x, all of one group) share the activations through multicast: each fetches its part of
// every stage. At 64 tokens they are 512 KiB a block, and 128 blocks would read 67 MB from L2.
//
// SPLITS > 1 restarts the chain at multiples of `split_columns` and adds the parts ascending in fp32: what cuBLAS does for one
// group below about 160 rows.
#include "hopper.cuh"
#include "wgmma_shared.cuh"  // generated for N = 16: wgmma_shared(d, descriptor of A, descriptor of B)

#ifndef DEPTH
#define DEPTH 4096
#endif
#ifndef TRIGGER_STEP
#define TRIGGER_STEP 0
#endif
constexpr int DECODERS = 8, MULTIPLIERS = 4, THREADS = (DECODERS + MULTIPLIERS + 1) * 32;
constexpr int STEPS = DEPTH / BK, BOXES = BK / 64, COLUMN_TILES = DEPTH / 32, TILES = COLUMN_TILES / DECODERS;
constexpr int HELD = TILES / 2;  // tiles a lane holds at once: with all 16 two blocks do not fit a multiprocessor
constexpr int TILES_PER_STEP = BK / 32;  // decoder warps that fill a stage
constexpr int BOX_BYTES = TOKENS * 128, ACTIVATION_BYTES = BOXES * BOX_BYTES, WEIGHT_BYTES = 16 * BK * 2;
constexpr int PART = TOKENS / CLUSTER;  // tokens of a box that this block fetches
// The multipliers look one stage ahead before they release the one behind.
static_assert(STAGES >= 3 && STEPS % STAGES == 0, "");
static_assert(TOKENS % (8 * CLUSTER) == 0 && TILES_PER_STEP <= DECODERS && DECODERS % TILES_PER_STEP == 0, "");

struct Shared {
    // wgmma reads 64 rows from every box, also where fewer tokens stand: what follows is read then, and not used.
    u8 activations[STAGES][ACTIVATION_BYTES];
    u8 weights[STAGES][WEIGHT_BYTES];
    u64 activations_full[STAGES], activations_empty[STAGES], weights_full[STAGES], weights_empty[STAGES];
};
static_assert(STAGES * WEIGHT_BYTES + TOKENS * 128 >= 8192, "64 rows of the last box stay inside shared memory");

DEVICE void barrier_arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

DEVICE void store_matrices(u32 address, u32 v0, u32 v1, u32 v2, u32 v3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v0), "r"(v1), "r"(v2), "r"(v3)
                 : "memory");
}

// Decoded tile -> the B operand: 8 rows of 128 bytes (64 columns), 16-byte chunks swizzled by the row; rows 8..15 1024 bytes on.
template <bool WIDE> DEVICE void decode_tile(u8 *box, int half, const uint4 &words, u32 exponent) {
    u32 factor = decode_factor<WIDE>(exponent);
    int lane = lane_id(), row = lane & 7, matrix = lane >> 3;
    const u32 w[4] = {words.x, words.y, words.z, words.w};
    u32 upper[4], lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) decode_word<WIDE>(w[i], factor, upper[i], lower[i]);
    // Word i is chunk 4 * half + i of its row; lanes 8i..8i+7 give the addresses of chunk i.
    u32 address = smem_address(box) + row * 128 + (((half * 4 + matrix) ^ row) * 16);
    store_matrices(address, upper[0], upper[1], upper[2], upper[3]);
    store_matrices(address + 1024, lower[0], lower[1], lower[2], lower[3]);
}

// Tiles i * 8 + warp. With stages of fewer than 8 tiles, warps take turns with stages. A fresh barrier lets those who fill
// pass: they wait for the parity before.
template <bool WIDE> DEVICE void decode_all(Shared &shared, uint4 (&words)[HELD], const u8 *src, u32 exponents, int warp) {
    constexpr int TURNS = DECODERS / TILES_PER_STEP;
    int tile = warp % TILES_PER_STEP, turn = warp / TILES_PER_STEP;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        int step = i * TURNS + (TURNS > 1 ? turn : 0), stage = step % STAGES;
        barrier_wait(&shared.weights_empty[stage], step / STAGES + 1 & 1);
        decode_tile<WIDE>(shared.weights[stage] + tile / 2 * 2048, tile % 2, words[i % HELD], __shfl_sync(~0u, exponents, i));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(&shared.weights_full[stage]);
        if (i + HELD < TILES) words[i % HELD] = load_stream(src + (i + HELD) * DECODERS * TILE_BYTES);
    }
}

// Fetches this block's part of every stage for all blocks of the cluster.
DEVICE void fetch_all(Shared &shared, const TensorMap *map, int group_coordinate, int part) {
#pragma unroll 1
    for (int round = 0; round < STEPS / STAGES; ++round) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            u64 *full = &shared.activations_full[stage];
            barrier_wait(&shared.activations_empty[stage], round + 1 & 1);
            barrier_expect(full, ACTIVATION_BYTES);
#pragma unroll
            for (int box = 0; box < BOXES; ++box) {
                u8 *dst = shared.activations[stage] + box * BOX_BYTES + part * PART * 128;
                int column = (round * STAGES + stage) * BK + box * 64;
                if (CLUSTER > 1) copy_box_multicast(dst, map, column, group_coordinate, part * PART, full, (1 << CLUSTER) - 1);
                else copy_box(dst, map, column, group_coordinate, 0, full);
            }
        }
    }
}

// Chain over all of K; d: tokens warp * 16 + g (+ 8), weight rows 8j + 2t (+ 1). The ring is unrolled, so that operand
// descriptors are constants in uniform registers: moving them there took longer than the products.
DEVICE void multiply_all(float (&d)[8], Shared &shared, int split_steps) {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    u32 peer_empty = remote_address(shared.activations_empty, lane % CLUSTER);
    const u32 a = operand_low(smem_address(shared.activations)), b = operand_low(smem_address(shared.weights));
#if SPLITS > 1
    float total[8];
    int left = split_steps;
#pragma unroll
    for (int i = 0; i < 8; ++i) total[i] = -0.f;  // the neutral element
#endif
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i] = 0.f;
    barrier_wait(&shared.weights_full[0], 0);
    barrier_wait(&shared.activations_full[0], 0);
#pragma unroll 1
    for (int round = 0; round < STEPS / STAGES; ++round) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            const int next = (stage + 1) % STAGES, before = (stage + STAGES - 1) % STAGES;
            const bool last = stage == STAGES - 1 && round == STEPS / STAGES - 1;
            if (stage == TRIGGER_STEP % STAGES && round == TRIGGER_STEP / STAGES) let_next_kernel_start();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                wgmma_fence();
#pragma unroll
                for (int k = half * (BK / 32); k < (half + 1) * (BK / 32); ++k)
                    wgmma_shared(d, operand(a + (stage * ACTIVATION_BYTES + k / 4 * BOX_BYTES + k % 4 * 32) / 16),
                                 operand(b + (stage * WEIGHT_BYTES + k / 4 * 2048 + k % 4 * 32) / 16));
                wgmma_commit();
                // Half a stage early, so that the chain does not stop between stages.
                if (half == 0 && !last) {
                    barrier_wait(&shared.weights_full[next], round + (stage == STAGES - 1) & 1);
                    barrier_wait(&shared.activations_full[next], round + (stage == STAGES - 1) & 1);
                }
            }
            // The stage before this one is read. Stages that nobody refills are not released: their block may have exited.
            wgmma_wait<1>();
            if (stage > 0 ? round < STEPS / STAGES - 1 : round > 0) {
                if (lane < CLUSTER) barrier_arrive_remote(peer_empty + before * 8);
                if (lane == 0) barrier_arrive(&shared.weights_empty[before]);
            }
#if SPLITS > 1
            if (--left == 0 || last) {
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    total[i] = __fadd_rn(total[i], d[i]);
                    d[i] = 0.f;
                }
                left = split_steps;
            }
#endif
        }
    }
    wgmma_wait<0>();
#if SPLITS > 1
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i] = total[i];
#endif
}

// Grid (R / 16, 1, G), THREADS threads, clusters of CLUSTER in x. map: activations [T, G, DEPTH], boxes of 64 columns x 1 group x
// PART tokens, 128-byte swizzle, zeros outside. tokens <= TOKENS <= 64.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
mid(const __grid_constant__ TensorMap map, int group_step, const u8 *codes, const u8 *exponents, u16 *out, int tokens, int rank,
    int split_columns) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    int lane = lane_id(), warp = warp_id(), group = blockIdx.z, row_tile = blockIdx.x;
    uint4 words[HELD];
    u32 exponent = 0;
    const u8 *src = codes + ((static_cast<long long>(group) * (rank / 16) + row_tile) * COLUMN_TILES + warp) * TILE_BYTES + lane * 16;
    if (warp < DECODERS) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) words[i] = load_stream(src + i * DECODERS * TILE_BYTES);
        const u8 *block = exponents + (static_cast<long long>(group) * (rank / 32) + row_tile / 2) * COLUMN_TILES + warp;
        if (lane < TILES) exponent = block[lane * DECODERS];
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.activations_full[i], 1);
            barrier_init(&shared.activations_empty[i], MULTIPLIERS * CLUSTER);
            barrier_init(&shared.weights_full[i], TILES_PER_STEP);
            barrier_init(&shared.weights_empty[i], MULTIPLIERS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (CLUSTER > 1) { cluster_arrive_relaxed(); cluster_wait(); }

    if (warp < DECODERS) {
        if (__any_sync(~0u, exponent > MAX_NARROW_EXPONENT)) decode_all<true>(shared, words, src, exponent, warp);
        else decode_all<false>(shared, words, src, exponent, warp);
    } else if (warp < DECODERS + MULTIPLIERS) {
        float d[8];
        wait_for_previous_kernel();
        multiply_all(d, shared, split_columns / BK);
        int token = (warp - DECODERS) * 16 + lane / 4;
        u16 *to = out + (static_cast<long long>(token) * gridDim.z + group) * rank + row_tile * 16 + lane % 4 * 2;
        long long eight = 8ll * gridDim.z * rank;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (token + half * 8 >= tokens) break;
            *reinterpret_cast<u32 *>(to + half * eight) = round_pair(d[2 * half], d[2 * half + 1]);
            *reinterpret_cast<u32 *>(to + half * eight + 8) = round_pair(d[4 + 2 * half], d[5 + 2 * half]);
        }
    } else if (lane == 0) {
        wait_for_previous_kernel();
        fetch_all(shared, &map, group * group_step, CLUSTER > 1 ? cluster_rank() : 0);
    }
}
