//! Random requests over several connections of all styles against a flat array, and against stock tools at the end.

use crate::nbd_common::{Client, Fixture, SIZE, Style, chain_content, run, text};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use vmstrata_export::nbd::protocol::CommandFlags as F;
use vmstrata_export::nbd::protocol::request::Command;

/// A range of any alignment; short ones are the most frequent.
fn range(random: &mut SmallRng) -> (u64, u64) {
    let longest = 1u64 << random.random_range(0..22);
    let length = random.random_range(1..=longest);
    (random.random_range(0..=SIZE - length), length)
}

/// One request on one connection, carried out on the model too.
fn step(random: &mut SmallRng, client: &mut Client, model: &mut [u8]) {
    let (offset, length) = range(random);
    let part = &mut model[offset as usize..(offset + length) as usize];
    let fua = if random.random_ratio(1, 8) { F::FUA } else { F::empty() };
    match random.random_range(0..10) {
        0..4 => assert!(client.read(offset, length).unwrap() == *part, "{offset}+{length}"),
        4..7 => {
            random.fill(part);
            let cookie = client.send_write(offset, part, !fua.is_empty());
            client.reply(cookie).unwrap();
        }
        7 => {
            let no_hole = if random.random() { F::NO_HOLE } else { F::empty() };
            client.call(Command::WriteZeroes, fua | no_hole, offset, length).unwrap();
            part.fill(0);
        }
        8 => {
            client.call(Command::Trim, fua, offset, length).unwrap();
            // Whatever it reads as now is what it must go on reading as.
            part.copy_from_slice(&client.read(offset, length).unwrap());
        }
        _ => client.flush().unwrap(),
    }
}

#[test]
fn any_requests_leave_what_a_flat_array_has() {
    for seed in 0..3 {
        let mut random = SmallRng::seed_from_u64(seed);
        let fixture = Fixture::chain();
        let mut clients = [Style::Simple, Style::Structured, Style::Extended, Style::Structured]
            .map(|style| fixture.client(style));
        let mut model = chain_content();
        for _ in 0..250 {
            let client = random.random_range(0..clients.len());
            step(&mut random, &mut clients[client], &mut model);
        }
        for client in &mut clients {
            assert!(client.read(0, SIZE).unwrap() == model, "seed {seed}");
        }
        drop(clients);
        let directory = fixture.stop();
        let (active, flat) = (directory.path().join("active"), directory.path().join("flat"));
        run("qemu-img", &["check", "-q", text(&active)]);
        run("qemu-img", &["convert", "-O", "raw", text(&active), text(&flat)]);
        assert!(std::fs::read(flat).unwrap() == model, "seed {seed}: what stock tools read");
    }
}
