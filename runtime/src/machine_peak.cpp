// The limits of `ktc/machine_peak.hpp` as plain functions, for `ktc bench`.

#define KTC_UNIT machine_peak

#include "ktc/machine_peak.hpp"

extern "C" __attribute__((visibility("default"))) std::int64_t multiply_in_registers(std::int64_t rounds) {
  return ktc::multiply_in_registers(rounds);
}

extern "C" __attribute__((visibility("default"))) std::uint64_t read_in_order(const std::byte* data,
                                                                              std::size_t bytes) {
  return ktc::read_in_order(data, bytes);
}
