// fault_plan.h: which faults a rail injects, parsed from the options of its spec. Pure values, no I/O, any thread.
// Requests are counted per rail from 1, in the order in which post() accepts them; two-sided messages are not counted.
#pragma once

#include <cstdint>
#include <string>

#include "provider/provider.h"

namespace asyncfabric {

// X(option, field, default): every option is an unsigned number; 0 switches a fault off unless stated otherwise.
#define ASYNCFABRIC_FAULT_OPTIONS(X)                                                                            \
  X("seed", seed, 1)                         /* of all random choices */                                        \
  X("reorder", reorder, 0)                   /* hold up to so many requests, release them in random order */    \
  X("delay_us", delay_us, 0)                 /* hold each request so long: a late write */                      \
  X("error_at", error_at, 0)                 /* the n-th request fails kTransport and is not executed */        \
  X("error_every", error_every, 0)           /* so does each n-th */                                            \
  X("busy_every", busy_every, 0)             /* each n-th request is refused once with kBusy */                 \
  X("dead_peer_after", dead_peer_after, 0)   /* after n requests nothing leaves and nothing arrives any more */ \
  X("hang", hang, 0)                         /* the n-th and later requests stay outstanding; messages pass */  \
  X("flush", flush, 1)                       /* 0: disconnect() cannot flush and returns kUnsupported */        \
  X("slow_reader_us", slow_reader_us, 0)     /* take at most one event from the inner rail in so long */        \
  X("refuse_register", refuse_register, 0)   /* the n-th registration fails kNoMemory */                        \
  X("rail_down_at", rail_down_at, 0)         /* at the n-th request the rail goes down with what it holds */    \
  X("rail_up_after_us", rail_up_after_us, 0) /* and comes up again so much later; 0: never */                   \
  X("no_immediates", no_immediates, 0)       /* 1: refuse to open, as for a device without immediates */        \
  X("harm_messages", harm_messages, 0)       /* lose the first message that this rail sends and one in n */

struct FaultPlan {
#define X(option, field, fallback) uint64_t field = fallback;
  ASYNCFABRIC_FAULT_OPTIONS(X)
#undef X
};

// Splits the spec of a "fault+<inner>" rail into the plan and the spec of the inner rail, which gets all other options.
Status parse_fault_spec(const RailSpec& spec, FaultPlan* plan, RailSpec* inner, std::string* detail);

// All options, separated by commas.
std::string fault_option_names();

}  // namespace asyncfabric
