// Objects of OpenSSL that are freed with their owner, its view of a text, and its errors.
#ifndef DMUOND_SERVER_DAEMON_GROUP_OPENSSL_OBJECTS_H_
#define DMUOND_SERVER_DAEMON_GROUP_OPENSSL_OBJECTS_H_

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <memory>
#include <string>

namespace dmuond::server {

template <auto kFree>
struct FreedBy {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using Bio = std::unique_ptr<BIO, FreedBy<BIO_free>>;
using Certificate = std::unique_ptr<X509, FreedBy<X509_free>>;
using GeneralNames = std::unique_ptr<GENERAL_NAMES, FreedBy<GENERAL_NAMES_free>>;
using Key = std::unique_ptr<EVP_PKEY, FreedBy<EVP_PKEY_free>>;
using Ssl = std::unique_ptr<SSL, FreedBy<SSL_free>>;

// What OpenSSL's queue of errors of this thread says, which is empty afterwards.
inline std::string WhatOpenSslSays() {
  const unsigned long error = ERR_peek_error();
  const char* reason = error == 0 ? nullptr : ERR_reason_error_string(error);
  ERR_clear_error();
  return reason == nullptr ? "the connection has ended" : reason;
}

// `text` must outlive it.
inline Bio Reader(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_OPENSSL_OBJECTS_H_
