// segment_guests.cc: see segment_guests.h. The layout of the table: libfabric 1.17, prov/shm, read off the running library.
#include "providers/libfabric/segment_guests.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "providers/libfabric/process.h"

namespace asyncfabric::libfabric {
namespace {

constexpr uint32_t kKnownVersion = FI_VERSION(1, 17);
constexpr size_t kSpare = 24;  // for those who ask at the same time
constexpr uint8_t kCanCopy = 1;

struct TableEntry {
  char name[256];
  int64_t number;  // -1: free
  fi_addr_t address;
  const SegmentHead* segment;
};
static_assert(sizeof(TableEntry) == 280);

bool used(const SegmentPeer& peer) {
  return __atomic_load_n(&peer.number, __ATOMIC_RELAXED) >= 0 ||
         __atomic_load_n(&peer.name[0], __ATOMIC_RELAXED) != '\0';
}

std::string_view name_of(const TableEntry& entry) { return {entry.name, strnlen(entry.name, sizeof entry.name)}; }

// One that may fall back on pieces is left in the table: libfabric keeps a list of its pieces, and looks at it for ever.
bool left(const TableEntry& entry) {
  if (entry.number < 0 || entry.address != FI_ADDR_NOTAVAIL || entry.segment == nullptr) return false;
  if (entry.segment->can_copy_peer != kCanCopy) return false;
  if (said_farewell(*entry.segment)) return true;
  const auto process = ProcessWatch::open(name_of(entry));
  return process != nullptr && process->ended();
}

}  // namespace

struct GuestTable {
  pthread_spinlock_t lock;
  int64_t next;
  int32_t count;
  int32_t flags;
  void* tree[8];
  TableEntry entries[kSegmentPeers];
};
static_assert(offsetof(GuestTable, entries) == 0x58);

std::unique_ptr<SegmentGuests> SegmentGuests::open(const Device& device) {
  if (device.library().fi_version() != kKnownVersion) return nullptr;
  std::unique_ptr<Segment> segment = Segment::of(device.endpoint());
  if (segment == nullptr || segment->head().peer_map == 0) return nullptr;
  auto* table = std::bit_cast<GuestTable*>(segment->head().peer_map);
  return std::unique_ptr<SegmentGuests>(new SegmentGuests(std::move(segment), table));
}

void SegmentGuests::send_off(const Device& device) {
  std::vector<size_t> gone;
  for (size_t i = 0; i < kSegmentPeers; ++i)
    if (left(table_->entries[i])) gone.push_back(i);
  if (gone.empty() || !segment_->queue_is_empty()) return;  // in this order: what left posts no more
  for (const size_t i : gone) {
    const std::string name(name_of(table_->entries[i]));
    fi_addr_t address = FI_ADDR_UNSPEC;
    // Known by name already: the insertion gives the entry an address by which it can be removed.
    if (fi_av_insert(device.av(), name.c_str(), 1, &address, 0, nullptr) != 1) continue;
    (void)fi_av_remove(device.av(), &address, 1, 0);
    __atomic_store_n(&segment_->peers()[i].number, -1, __ATOMIC_RELAXED);
  }
}

bool SegmentGuests::may_call(std::string_view endpoint_name) const {
  const std::unique_ptr<Segment> segment = Segment::open(shm_segment_name(endpoint_name));
  if (segment == nullptr) return false;
  const auto taken = [](const TableEntry& entry) { return entry.number >= 0; };
  const auto theirs = segment->peers();
  constexpr auto kMost = static_cast<ptrdiff_t>(kSegmentPeers - kSpare);
  return std::count_if(table_->entries, table_->entries + kSegmentPeers, taken) < kMost &&
         std::count_if(theirs.begin(), theirs.end(), used) < kMost;
}

bool SegmentGuests::holds(std::string_view endpoint_name) const {
  const std::string_view name = endpoint_name.substr(0, endpoint_name.find('\0'));
  return std::any_of(table_->entries, table_->entries + kSegmentPeers,
                     [name](const TableEntry& entry) { return entry.number >= 0 && name_of(entry) == name; });
}

}  // namespace asyncfabric::libfabric
