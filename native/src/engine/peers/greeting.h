// greeting.h: what hellos, challenges, proofs and welcomes have in common: a lane, and the life of the sender's entry. Under the engine lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/peers/peer.h"
#include "engine/wire.h"

namespace asyncfabric {

// Lives grow, and begin again after 16 million.
inline bool is_later(uint32_t life, uint32_t than) {
  return (life > than) == (std::max(life, than) - std::min(life, than) < kMostLives / 2);
}

// The value of hellos and welcomes: the lane that they are about, and the life of the sender's entry.
struct Greeting {
  uint64_t lane = 0;
  uint32_t life = 0;
};

inline uint64_t greeting(uint64_t lane, const Peer& from) { return lane | uint64_t{from.life()} << 32; }

inline bool read_greeting(uint64_t value, uint64_t lanes, Greeting* out) {
  *out = {value & 0xffffffff, static_cast<uint32_t>(value >> 32)};
  return out->lane < lanes && out->life != 0 && out->life <= kMostLives;
}

// What an earlier life of theirs reported of its counters may have changed since.
inline void begin_life(Peer& peer, uint32_t life) {
  if (peer.their_life == life) return;
  peer.their_life = life;
  peer.counter_generations = {};
  peer.generations_from = 0;
  peer.closings_taken = {};
  peer.proven.clear();
  peer.admitted_lanes = 0;
}

inline std::string header_bytes(const MessageHeader& header) {
  std::string bytes(kHeaderBytes, '\0');
  encode_header(header, bytes.data());
  return bytes;
}

}  // namespace asyncfabric
