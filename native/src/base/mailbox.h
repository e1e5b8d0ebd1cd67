// mailbox.h: intrusive lock-free queue, many producers, one consumer (whoever holds the engine lock).
// Producers: any thread that submits. Never allocates, never blocks. Order per producer is kept.
// Seam: tests stop a producer between its two writes, the only window in which the queue is not empty but
// nothing can be taken; `empty()` is false there, so the worker does not go to sleep on it.
#pragma once

#include <atomic>

namespace asyncfabric {

struct MailLink {
  std::atomic<MailLink*> next{nullptr};  // partner: the producer that follows stores it, the consumer loads it
};

struct NoSeam {
  static void between_exchange_and_link() {}
};

template <class Seam = NoSeam>
class BasicMailbox {
 public:
  BasicMailbox() : head_(&stub_), tail_(&stub_) {}
  BasicMailbox(const BasicMailbox&) = delete;
  BasicMailbox& operator=(const BasicMailbox&) = delete;

  void push(MailLink* link) {
    link->next.store(nullptr, std::memory_order_relaxed);
    // seq_cst: pairs with empty(), so that producer and sleeper cannot both miss each other (see wake_gate.h).
    MailLink* before = head_.exchange(link, std::memory_order_seq_cst);
    Seam::between_exchange_and_link();
    before->next.store(link, std::memory_order_release);
  }

  // Null: empty, or the next producer has not linked its node yet.
  MailLink* pop() {
    MailLink* tail = tail_;
    MailLink* next = tail->next.load(std::memory_order_acquire);
    if (tail == &stub_) {
      if (next == nullptr) return nullptr;
      tail_ = next;
      tail = next;
      next = next->next.load(std::memory_order_acquire);
    }
    if (next != nullptr) {
      tail_ = next;
      return tail;
    }
    if (tail != head_.load(std::memory_order_acquire)) return nullptr;
    push(&stub_);
    next = tail->next.load(std::memory_order_acquire);
    if (next == nullptr) return nullptr;
    tail_ = next;
    return tail;
  }

  // Consumer only. False also while a producer is half way.
  bool empty() const { return tail_ == &stub_ && head_.load(std::memory_order_seq_cst) == &stub_; }

 private:
  alignas(64) std::atomic<MailLink*> head_;  // partner: producers exchange it, the consumer compares
  alignas(64) MailLink* tail_;
  MailLink stub_;
};

using Mailbox = BasicMailbox<>;

}  // namespace asyncfabric
