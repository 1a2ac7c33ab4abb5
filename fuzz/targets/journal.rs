//! The entry point of libFuzzer to [`vmstrata_fuzz_bodies::journal`].

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmstrata_fuzz_bodies::journal(data));
