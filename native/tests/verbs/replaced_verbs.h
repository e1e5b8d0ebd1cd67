// replaced_verbs.h: what a test decides about, and learns from, the library of replaced_verbs.cc: a libibverbs with one device, "mlx5_7",
// of one RoCE port. Each opening of it is a context; queue pairs of all contexts reach each other, and post_send carries out what it is given
// before it returns: datagrams, messages, writes. Events, and the death of a device, are of the first context that is open.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace asyncfabric::testing {

struct ReplacedVerbs {  // partners: the test, and the rail's threads inside the library
  // decided by the test
  std::atomic<uint8_t> link_layer = IBV_LINK_LAYER_ETHERNET;
  std::atomic<uint16_t> lid = 0;
  std::atomic<uint8_t> active_speed = 128;
  std::atomic<uint8_t> active_width = 2;
  std::atomic<uint32_t> refused_openings = 0;  // of those that are to come
  // learned by the test
  std::atomic<uint32_t> unacknowledged = 0;        // events that were handed out
  std::atomic<uint32_t> registrations = 0;         // that live
  std::atomic<uint32_t> openings = 0;              // that were tried
  std::atomic<uint32_t> left = 0;                  // objects that a context had when it was closed
  std::atomic<uint32_t> largest_queue = 0;         // completion queue, in entries
  ibv_ah_attr (*newest_path)() = nullptr;          // that an address handle was made for
  void (*happens)(int event, int port) = nullptr;  // makes an event; any thread
  // A datagram of a stranger's.
  void (*datagram)(uint32_t qpn, uint32_t qkey, const void* bytes, size_t length) = nullptr;
};

}  // namespace asyncfabric::testing
