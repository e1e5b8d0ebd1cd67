// segment_guests.h: the callers of a shm rail. libfabric 1.17 enters everybody who asks to be let in into a table of 256 and takes nobody
// out: the segment of a caller that left stays mapped, and the 257th one takes the place of another, whose writes are then fetched from
// the wrong process. So the rail takes out those who left, and nobody calls a rail whose table is nearly full. Control calls and polls.
#pragma once

#include <memory>
#include <string_view>

#include "providers/libfabric/device.h"
#include "providers/libfabric/segment.h"

namespace asyncfabric::libfabric {

struct GuestTable;

class SegmentGuests {
 public:
  static std::unique_ptr<SegmentGuests> open(
      const Device& device);  // null: another libfabric, whose table is not known here

  // Takes out whoever said farewell or died, once nothing of theirs is in the queue. The caller has receives posted: a message that
  // waits for one would be fetched from a segment that is gone.
  void send_off(const Device& device);
  // Whether one more fits into this table and into that of the rail of that endpoint name, which must be there still.
  bool may_call(std::string_view endpoint_name) const;
  // A name whose segment was gone when it was inserted has a place in the table that libfabric takes for free.
  bool holds(std::string_view endpoint_name) const;

 private:
  SegmentGuests(std::unique_ptr<Segment> segment, GuestTable* table) : segment_(std::move(segment)), table_(table) {}
  std::unique_ptr<Segment> segment_;
  GuestTable* table_;  // libfabric's, in the memory of this process
};

}  // namespace asyncfabric::libfabric
