// The two limits of this machine; the speed of a kernel is reported as a share of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#if defined(__AMX_BF16__)
#include "ktc/isa/amx_tiles.hpp"
#include "ktc/unit.hpp"
#elif defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace ktc::inline KTC_UNIT {

// Independent accumulators: enough to cover the latency of a multiply-add, few enough to stay in registers.
inline constexpr int kPeakAccumulators = 24;

#if defined(__AVX512BF16__)
struct PeakMultiply {
  using Vector = __m512;
  static constexpr std::int64_t kFlops = 64;
  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector step(Vector sum) {
    const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
    return _mm512_dpbf16_ps(sum, ones, ones);
  }
};
#else
struct PeakMultiply {
#if defined(__AVX2__)
  static constexpr std::size_t kBytes = 32;
#else
  static constexpr std::size_t kBytes = 16;
#endif
  typedef float Vector __attribute__((vector_size(kBytes)));
  static constexpr std::int64_t kFlops = 2 * static_cast<std::int64_t>(kBytes / sizeof(float));
  static Vector zero() { return Vector{}; }
  static Vector step(Vector sum) { return sum * 0.5f + 1.0f; }  // one FMA where the compiler may contract it
};
#endif

// Multiply-adds on registers alone, `rounds` of each accumulator; returns the floating point operations done.
#if defined(__AMX_BF16__)
inline std::int64_t multiply_in_registers(std::int64_t rounds) {
  constexpr std::int64_t kFlops = 2 * amx::kTileRows * amx::kTileRows * (amx::kTileBytes / 2);
  amx::request_tiles();
  amx::Tiles tiles;
  tiles.shape_for(2 * amx::kTileRows);
  for (std::int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return rounds * 4 * kFlops;
}
#else
inline std::int64_t multiply_in_registers(std::int64_t rounds) {
  typename PeakMultiply::Vector sums[kPeakAccumulators];
#pragma GCC unroll 24
  for (auto& sum : sums) sum = PeakMultiply::zero();
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (auto& sum : sums) {
      sum = PeakMultiply::step(sum);
#if defined(__x86_64__)
      asm volatile("" : "+v"(sum));  // the result is never read, but the work must be done
#endif
    }
  }
  return rounds * kPeakAccumulators * PeakMultiply::kFlops;
}
#endif

// Read `bytes`, a multiple of 512, once and in order; returns a number that depends on all of them. In vectors that
// AVX2 has: with 64 bytes GCC 12 keeps the sums in memory there, and reads 23 GB/s where this reads 36.
inline std::uint64_t read_in_order(const std::byte* data, std::size_t bytes) {
  typedef std::uint64_t Vector __attribute__((vector_size(32), may_alias));
  const auto* vectors = reinterpret_cast<const Vector*>(data);
  std::array<Vector, 8> sums{};
  for (std::size_t at = 0; at < bytes / sizeof(Vector); at += sums.size()) {
#pragma GCC unroll 8
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += vectors[at + i];
  }
  std::uint64_t total = 0;
  for (const Vector& sum : sums) {
    for (int word = 0; word < 4; ++word) total += sum[word];
  }
  return total;
}

}  // namespace ktc::inline KTC_UNIT
