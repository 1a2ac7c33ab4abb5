//! The guest itself, on stock QEMU alone: it boots, and a chain of its disk holds the same files.

use xtask::guest::{Attach, BOOT_MAX, Guest, RootImage, Task, UP, Vm, spread};

#[test]
fn guest_boots_on_a_stock_chain_and_its_files_verify() {
    let dir = tempfile::tempdir().unwrap();
    let guest = Guest::here().unwrap();
    let raw = RootImage { size: 256 << 20, files: 4, file_size: 2 << 20 }.make(&guest, dir.path()).unwrap();
    let top = spread(&raw, &dir.path().join("chain"), 12).unwrap();
    let mut vm = Vm::boot(&guest, &Attach::Qcow2(top), Task::Verify).unwrap();
    let up = vm.wait_for(UP, BOOT_MAX).unwrap();
    vm.wait_for_end(BOOT_MAX).unwrap();
    assert!(vm.console().contains("guest: files verified"), "{}", vm.console());
    eprintln!("up after {:.1} s", up.as_secs_f64());
}
