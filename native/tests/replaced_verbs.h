// replaced_verbs.h: what a test decides about, and learns from, the library of replaced_verbs.cc: a libibverbs with one device, "mlx5_7",
// of one RoCE port. It carries nothing: rails open over it, and hear of the events that the test makes.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>

namespace asyncfabric::testing {

struct ReplacedVerbs {  // partners: the test, and the rail's threads inside the library
  // decided by the test
  std::atomic<uint8_t> link_layer = IBV_LINK_LAYER_ETHERNET;
  std::atomic<uint16_t> lid = 0;
  std::atomic<uint8_t> active_speed = 128;
  std::atomic<uint8_t> active_width = 2;
  // learned by the test
  std::atomic<uint32_t> unacknowledged = 0;        // events that were handed out
  std::atomic<uint32_t> registrations = 0;         // that live
  ibv_ah_attr (*newest_path)() = nullptr;          // that an address handle was made for
  void (*happens)(int event, int port) = nullptr;  // makes an event; any thread
};

}  // namespace asyncfabric::testing
