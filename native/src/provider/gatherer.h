// gatherer.h: bytes that lie apart, of which a rail that moves bytes itself (capabilities().gathers) takes the next ones in order.
// Under the engine lock, except copy_part.
#pragma once

#include <cstdint>

namespace asyncfabric {

class Gatherer {
 public:
  virtual ~Gatherer() = default;
  // `length` bytes, behind the first `before` ones of all: once, in order. False, and nothing was copied: it is not their turn.
  virtual bool copy(uint8_t* to, uint64_t before, uint64_t length) = 0;

  // The same by several threads. Parts begin `at` multiples of kPartBytes; each once, by anybody, between begin and end.
  static constexpr uint64_t kPartBytes = 1024;
  // False: it is not their turn, or only for one thread.
  virtual bool begin_parts(uint64_t before, uint64_t length) = 0;
  virtual void copy_part(uint8_t* to, uint64_t at, uint64_t length) = 0;  // any thread
  virtual void end_parts() = 0;                                           // all are copied
};

}  // namespace asyncfabric
