// options.h: the options of a verbs rail: how RailSpec words become values. Opening thread.
#pragma once

#include <string>

#include "asyncfabric/types.h"
#include "providers/verbs/device/port.h"

namespace asyncfabric::verbs {

struct Options {
  std::string library;             // library=<file>: instead of libibverbs.so.1
  std::string device;              // RailSpec::device; "" lets the provider choose
  uint32_t port = 0;               // port=<1..>: 0 chooses the first active one
  GidWish gid;                     // gid=<index, address or interface>: without it the best one, see choose_gid
  uint32_t mtu = 4096;             // mtu=256|512|1024|2048|4096: upper bound; the port's and the peer's count too
  uint32_t pkey = 0;               // pkey=<index into the port's table>
  uint32_t traffic_class = 0;      // traffic_class=<0..255>: DSCP << 2 on RoCE
  uint32_t service_level = 0;      // service_level=<0..15>
  uint32_t timeout = 14;           // timeout=<0..31>: 4.096 us * 2^n until a packet is sent again
  uint32_t retry = 7;              // retry=<0..7>
  uint32_t rnr_retry = 7;          // rnr_retry=<0..7>: 7 is for ever, what counts need
  uint32_t qps = 2;                // qps=1|2: with 1 small signals share the queue of the bulk
  uint32_t depth = 512;            // depth=<16..16384>: requests of one queue pair
  uint32_t receives = 1024;        // receives=<4..16384>: receives that wait for immediates
  uint32_t chain = 32;             // chain=<1..64>: requests per doorbell
  uint32_t silence_ms = 10000;     // silence=<100..>: a device that reports nothing for so long is not waited for
  bool relaxed_ordering = true;    // relaxed_ordering=0|1
  uint32_t reopen_ms = 1000;       // not an option: until a failed device is opened again, doubled with each try
  std::string sysfs = kSysfsRoot;  // not an option: tests have trees of their own
};

Status parse_options(const RailSpec& spec, Options* out, std::string* detail);

}  // namespace asyncfabric::verbs
