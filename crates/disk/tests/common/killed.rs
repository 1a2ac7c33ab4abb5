//! Processes that are killed, and what a disk must read as afterwards.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use vmstrata_disk::Disk;

use super::flat::read;

/// Every number is written at the first place, and at the second when that has completed.
pub const PLACES: [u64; 2] = [0, 3 << 20];

/// The numbers at both places, which every state of the disk must have whole and in order.
pub fn numbers(disk: &Disk, what: &str) -> [u64; 2] {
    let numbers = PLACES.map(|place| {
        let bytes = read(disk, place, 4096).unwrap();
        let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert_eq!(bytes, number.to_le_bytes().repeat(512), "a torn block in {what}");
        number
    });
    assert!(numbers[0] == numbers[1] || numbers[0] == numbers[1] + 1, "{what}: {numbers:?}");
    numbers
}

/// Runs `test` of this test binary in a process of its own, with `orders` in the variable `name`; whether it was killed.
pub fn is_killed(test: &str, name: &str, orders: String) -> bool {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--include-ignored", "--nocapture"])
        .env(name, orders)
        .output()
        .unwrap();
    let killed = output.status.signal() == Some(9);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(killed || said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
    killed
}
