// replaced_verbs.h: what a test decides about, and learns from, the library of replaced_verbs.cc: a libibverbs with one device, "mlx5_7",
// of one RoCE port. It carries nothing: rails open over it, and hear of the events that the test makes.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

namespace asyncfabric::testing {

struct ReplacedVerbs {
  // decided by the test
  uint8_t link_layer = IBV_LINK_LAYER_ETHERNET;
  uint16_t lid = 0;
  uint8_t active_speed = 128;
  uint8_t active_width = 2;
  // learned by the test
  uint32_t unacknowledged = 0;                     // events that were handed out
  uint32_t registrations = 0;                      // that live
  ibv_ah_attr newest_path{};                       // that an address handle was made for
  void (*happens)(int event, int port) = nullptr;  // makes an event; any thread
};

}  // namespace asyncfabric::testing
