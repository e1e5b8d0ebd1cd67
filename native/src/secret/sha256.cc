// sha256.cc: see sha256.h.
#include "secret/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

namespace asyncfabric::secret {
namespace {

constexpr size_t kBlockBytes = 64;

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class Sha256 {
 public:
  void add(std::string_view bytes) {
    length_ += bytes.size();
    while (!bytes.empty()) {
      const size_t part = std::min(bytes.size(), kBlockBytes - filled_);
      std::memcpy(block_ + filled_, bytes.data(), part);
      filled_ += part;
      bytes.remove_prefix(part);
      if (filled_ == kBlockBytes) take_block();
    }
  }

  Digest end() {
    const uint64_t bits = length_ * 8;
    block_[filled_++] = 0x80;
    if (filled_ > kBlockBytes - sizeof bits) {
      std::memset(block_ + filled_, 0, kBlockBytes - filled_);
      take_block();
    }
    std::memset(block_ + filled_, 0, kBlockBytes - filled_);
    for (size_t i = 0; i < sizeof bits; ++i) block_[kBlockBytes - 1 - i] = static_cast<uint8_t>(bits >> 8 * i);
    take_block();
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
  }

 private:
  // FIPS 180-4, 6.2.2.
  void take_block() {
    uint32_t w[64];
    for (size_t t = 0; t < 16; ++t)
      w[t] = uint32_t{block_[4 * t]} << 24 | uint32_t{block_[4 * t + 1]} << 16 | uint32_t{block_[4 * t + 2]} << 8 |
             uint32_t{block_[4 * t + 3]};
    for (size_t t = 16; t < 64; ++t) {
      const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ w[t - 15] >> 3;
      const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ w[t - 2] >> 10;
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (size_t t = 0; t < 64; ++t) {
      const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t first = h + sum1 + ((e & f) ^ (~e & g)) + kRounds[t] + w[t];
      const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t second = sum0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + first;
      d = c;
      c = b;
      b = a;
      a = first + second;
    }
    const std::array<uint32_t, 8> more{a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < more.size(); ++i) state_[i] += more[i];
    filled_ = 0;
  }

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t block_[kBlockBytes] = {};
  size_t filled_ = 0;
  uint64_t length_ = 0;
};

}  // namespace

Digest sha256(std::string_view bytes) {
  Sha256 hash;
  hash.add(bytes);
  return hash.end();
}

Digest hmac_sha256(std::string_view key, std::string_view bytes) {
  std::string padded(key.size() > kBlockBytes ? text_of(sha256(key)) : key);
  padded.resize(kBlockBytes, '\0');
  const auto masked = [&](char mask) {
    std::string out = padded;
    for (char& each : out) each = static_cast<char>(each ^ mask);
    return out;
  };
  Sha256 inner;
  inner.add(masked(0x36));
  inner.add(bytes);
  const Digest inside = inner.end();
  Sha256 outer;
  outer.add(masked(0x5c));
  outer.add(text_of(inside));
  return outer.end();
}

bool equal_in_constant_time(std::string_view one, std::string_view other) {
  if (one.size() != other.size()) return false;
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < one.size(); ++i)
    difference = static_cast<uint8_t>(difference | static_cast<uint8_t>(one[i] ^ other[i]));
  return difference == 0;
}

}  // namespace asyncfabric::secret
