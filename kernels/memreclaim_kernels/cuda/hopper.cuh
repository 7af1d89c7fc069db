// Barriers in shared memory, bulk copies and clusters: compute capability 9.0 and up.
#pragma once
#include "common.cuh"

DEVICE void barrier_init(u64 *barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}
DEVICE void barrier_arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}
DEVICE void barrier_wait(u64 *barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(smem_address(barrier)),
                 "r"(parity)
                 : "memory");
}
// Address of the same offset in block `block` of the cluster, and an arrival at a barrier there.
DEVICE u32 remote_address(const void *p, u32 block) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem_address(p)), "r"(block));
    return remote;
}
DEVICE void barrier_arrive_remote(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Global -> shared, `bytes` a multiple of 16; the barrier counts them when they have arrived.
DEVICE void copy_bulk(void *dst, const void *src, u32 bytes, u64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(dst)),
                 "l"(src), "r"(bytes), "r"(smem_address(barrier))
                 : "memory");
}
// The same into the same offset of every block whose bit is set in `blocks`.
DEVICE void copy_bulk_multicast(void *dst, const void *src, u32 bytes, u64 *barrier, u16 blocks) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(smem_address(dst)),
                 "l"(src), "r"(bytes), "r"(smem_address(barrier)), "h"(blocks)
                 : "memory");
}

DEVICE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// This block has begun and initialised its barriers; all blocks of the cluster have. Relaxed: a releasing arrive is a
// fence over the whole GPU in SASS, and what blocks exchange later travels with barriers of its own.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---- tensor maps ----------------------------------------------------------------------------------------------------
struct alignas(64) TensorMap {
    u64 opaque[16];
}; // CUtensorMap, encoded on the host

// A box of a [T, G, D] map at (column, group, token) into the same offset of every block whose bit is set in `blocks`.
DEVICE void copy_box_multicast(void *dst, const TensorMap *map, int column, int group, int token, u64 *barrier,
                               u16 blocks) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(dst)),
                 "l"(map), "r"(smem_address(barrier)), "r"(column), "r"(group), "r"(token), "h"(blocks)
                 : "memory");
}
DEVICE void copy_box(void *dst, const TensorMap *map, int column, int group, int token, u64 *barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
                 "%5}], [%2];" ::"r"(smem_address(dst)),
                 "l"(map), "r"(smem_address(barrier)), "r"(column), "r"(group), "r"(token)
                 : "memory");
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// K-major operand in shared memory, rows of 128 bytes (64 bf16), 128-byte swizzle, 8 rows every 1024 bytes. The low
// word counts 16 bytes, so that adding to it moves the operand; the high word is a constant.
DEVICE u32 operand_low(u32 address) { return (address & 0x3ffffu) >> 4 | 1u << 16; }
DEVICE u64 operand(u32 low) {
    u64 descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(1u << 30 | 1024 >> 4));
    return descriptor;
}

// Four 8x8 matrices of 16-bit values, a row each of lanes 0..31's addresses; and two of them transposed, so that a
// shared row is a column of the fragment.
DEVICE void store_matrices(u32 address, u32 v0, u32 v1, u32 v2, u32 v3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v0), "r"(v1),
                 "r"(v2), "r"(v3)
                 : "memory");
}
DEVICE void store_transposed(u32 address, u32 v0, u32 v1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(v0), "r"(v1)
                 : "memory");
}
