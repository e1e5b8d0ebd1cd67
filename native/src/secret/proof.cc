// proof.cc: see proof.h. Pure functions, any thread.
#include "secret/proof.h"

#include <sys/random.h>

#include <cstdlib>

#include "base/bytes.h"

namespace asyncfabric::secret {
namespace {

Digest code_of(std::string_view secret, std::string_view address, std::string_view header, std::string_view payload) {
  ByteWriter text;
  text.put_raw("asyncfabric peer 1");  // the secret may serve other protocols too
  text.put_string<uint32_t>(address);
  text.put_string<uint32_t>(header);
  text.put_raw(payload);
  return hmac_sha256(secret, text.text());
}

}  // namespace

Nonce fresh_nonce() {
  Nonce nonce;
  // Never short for so few bytes once the kernel's pool is filled, which the call waits for.
  if (getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) std::abort();
  return nonce;
}

void seal(std::string_view secret, std::string_view address, std::string_view header, std::string* payload) {
  const Digest code = code_of(secret, address, header, *payload);
  payload->append(text_of(code));
}

bool unseal(std::string_view secret, std::string_view address, std::string_view header, std::string_view* payload) {
  constexpr size_t kCodeBytes = sizeof(Digest);
  if (payload->size() < kCodeBytes) return false;
  const std::string_view body = payload->substr(0, payload->size() - kCodeBytes);
  const Digest wanted = code_of(secret, address, header, body);
  if (!equal_in_constant_time(text_of(wanted), payload->substr(body.size()))) return false;
  *payload = body;
  return true;
}

}  // namespace asyncfabric::secret
