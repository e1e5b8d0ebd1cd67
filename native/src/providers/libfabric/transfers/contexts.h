// contexts.h: one Context per outstanding request, from a fixed pool: nothing is allocated per request.
// A context is in the free list, or in its peer's list in the order of posting. libfabric holds pointers into the pool, so it
// outlives every endpoint. Under the engine lock only.
#pragma once

#include <cstdint>
#include <memory>

#include "provider/provider.h"
#include "providers/libfabric/device/library.h"

namespace asyncfabric::libfabric {

struct PeerState;

struct Context {
  fi_context2 fi{};  // first: providers with FI_CONTEXT write into it
  Context* previous = nullptr;
  Context* next = nullptr;
  PeerState* peer = nullptr;
  uint8_t* payload = nullptr;  // send slot of a two-sided message
  uint64_t tag = 0;
  uint64_t sequence = 0;  // of its peer, in the order of submission
  uint64_t bytes = 0;     // of memory that it writes or reads
  Status status;
  bool reported = true;       // the engine gets an event for it
  bool quiet = false;         // ... only if it fails
  bool acknowledges = false;  // its success proves that everything before it arrived
  bool barrier = false;       // submitted only when everything before it completed
  bool submitted = false;     // libfabric has it
  bool done = false;          // libfabric gave it back, or never got it
  bool unmet = false;         // a message to a peer that had not taken anything yet
  WorkRequest request;        // kept for requests that could not be submitted at once
};

// Doubly linked, intrusive: a context leaves from the middle on rails without order.
struct ContextList {
  Context* head = nullptr;
  Context* tail = nullptr;

  bool empty() const { return head == nullptr; }
  void push_back(Context* context) {
    context->previous = tail;
    context->next = nullptr;
    (tail != nullptr ? tail->next : head) = context;
    tail = context;
  }
  void insert_before(Context* place, Context* context) {
    context->previous = place->previous;
    context->next = place;
    (place->previous != nullptr ? place->previous->next : head) = context;
    place->previous = context;
  }
  void remove(Context* context) {
    (context->previous != nullptr ? context->previous->next : head) = context->next;
    (context->next != nullptr ? context->next->previous : tail) = context->previous;
    context->previous = context->next = nullptr;
  }
};

class ContextPool {
 public:
  explicit ContextPool(size_t count) : contexts_(std::make_unique<Context[]>(count)), count_(count) {
    for (size_t i = count; i > 0; --i) give(&contexts_[i - 1]);
  }
  Context* take() {
    Context* context = free_;
    if (context == nullptr) return nullptr;
    free_ = context->next;
    --available_;
    return context;
  }
  size_t available() const { return available_; }
  void give(Context* context) {
    context->peer = nullptr;
    context->payload = nullptr;
    context->next = free_;
    free_ = context;
    ++available_;
  }
  bool owns(const void* pointer) const { return pointer >= contexts_.get() && pointer < contexts_.get() + count_; }

 private:
  std::unique_ptr<Context[]> contexts_;
  size_t count_;
  size_t available_ = 0;
  Context* free_ = nullptr;
};

}  // namespace asyncfabric::libfabric
