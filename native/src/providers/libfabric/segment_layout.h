// segment_layout.h: what is known here of a segment of libfabric's shm provider. Facts about the layout: libfabric 1.17, prov/shm, read
// off live segments. Segments of another version have another number in their first byte and are left alone.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace asyncfabric::libfabric {

struct SegmentHead {
  static constexpr uint8_t kVersion = 4;
  uint8_t version;
  uint8_t reserved;
  uint16_t flags;
  int32_t pid;
  uint8_t can_copy_peer;
  uint8_t can_copy_self;
  uint32_t buffers_per_peer;
  uint64_t base_address;
  pthread_spinlock_t lock;
  int32_t signal;
  uint64_t peer_map;  // a pointer, of the owner's
  uint64_t total_bytes;
  uint64_t free_commands;
  uint64_t bounce_buffers;
  uint64_t command_queue_offset;
  uint64_t response_queue_offset;
  uint64_t inject_pool_offset;
  uint64_t bounce_pool_offset;
  uint64_t peers_offset;
  uint64_t name_offset;
  uint64_t socket_name_offset;
};
static_assert(offsetof(SegmentHead, lock) == 24);
static_assert(offsetof(SegmentHead, peers_offset) == 0x60);
static_assert(offsetof(SegmentHead, name_offset) == 0x68);

// At command_queue_offset: the owner has taken `taken` of the `put` commands.
struct SegmentQueue {
  uint64_t size;
  uint64_t mask;
  uint64_t taken;
  uint64_t put;
};

// One of kSegmentPeers at peers_offset: what the owner knows of a peer that it writes to.
struct SegmentPeer {
  char name[256];
  int64_t number;  // in the peer's own table: the peer writes it once it has read who asks; -1 before
  uint32_t bounce_status;
  uint32_t asked;  // 1: a request with our name is in the peer's queue, or was
};
static_assert(sizeof(SegmentPeer) == 272);

constexpr size_t kSegmentPeers = 256;

}  // namespace asyncfabric::libfabric
