//! What QEMU tells of a guest's processor.

use crate::introspect::Processor;
use crate::qmp::Qmp;

/// The guest's first processor; `None` where QEMU does not tell of it, or of one that has no such registers.
pub fn processor(qmp: &mut Qmp) -> Option<Processor> {
    parse(&qmp.monitor("info registers").ok()?)
}

/// Reads a text with lines such as `CR0=80050033 CR2=00007f3a5c0b1000 CR3=000000010288a000 CR4=00751ef0`.
fn parse(registers: &str) -> Option<Processor> {
    let register = |name: &str| {
        let mut words = registers.split_whitespace();
        let value = words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
        u64::from_str_radix(value, 16).ok()
    };
    Some(Processor::new(register("CR3")?, register("CR4")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_registers_are_found_among_the_others() {
        let text = "\
RAX=0000000000000000 RBX=ffffffff8180c3c0 RCX=0000000000000001 RDX=4000000000000000\r
GDT=     fffffe0000001000 0000007f\r
CR0=80050033 CR2=00007f3a5c0b1000 CR3=000000010288a805 CR4=00751ef0\r
DR0=0000000000000000 DR1=0000000000000000\r\n";
        assert_eq!(parse(text), Some(Processor::new(0x1_0288_a805, 0x75_1ef0)));
        assert_eq!(parse("PC=0000000000000000 X00=0000000000000000"), None);
        assert_eq!(parse("CR3=zz CR4=0"), None);
    }
}
