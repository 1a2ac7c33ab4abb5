//! Several take part in a measurement, each for a moment, again and again.
//!
//! A virtual machine's processors change their speed by half within a second, as what else their host runs comes and goes. Who
//! is compared must meet the same: what would be one long run of each is cut into short ones that alternate, and the median of
//! these is the rate.

use anyhow::Result;

use super::results::median;

/// Gives each of `who` a turn, then each again from the last to the first, and so on: `turns` of them. What each yields, by
/// participant.
///
/// # Errors
/// When a turn fails.
pub(super) fn in_turns<T>(
    who: &mut [T],
    turns: u32,
    mut one: impl FnMut(&mut T, u32) -> Result<f64>,
) -> Result<Vec<Vec<f64>>> {
    let mut yields = vec![Vec::new(); who.len()];
    let mut order: Vec<usize> = (0..who.len()).collect();
    for turn in 0..turns {
        for &index in &order {
            yields[index].push(one(&mut who[index], turn)?);
        }
        order.reverse();
    }
    Ok(yields)
}

/// The median of what each of `who` yields in its turns.
///
/// # Errors
/// When a turn fails.
pub(super) fn medians<T>(
    who: &mut [T],
    turns: u32,
    one: impl FnMut(&mut T, u32) -> Result<f64>,
) -> Result<Vec<f64>> {
    Ok(in_turns(who, turns, one)?.iter().map(|values| median(values)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_go_forwards_then_backwards() {
        let mut taken = Vec::new();
        let yields = in_turns(&mut ["a", "b"], 3, |who, turn| {
            taken.push(*who);
            Ok(f64::from(turn) + if *who == "b" { 10.0 } else { 0.0 })
        });
        assert_eq!(yields.unwrap(), [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]);
        assert_eq!(taken, ["a", "b", "b", "a", "a", "b"]);
    }

    #[test]
    fn a_turn_that_fails_ends_them() {
        assert!(
            medians(&mut [0], 3, |_, turn| if turn == 1 { anyhow::bail!("no") } else { Ok(1.0) }).is_err()
        );
        assert_eq!(medians(&mut [5.0], 3, |who, turn| Ok(*who * f64::from(turn))).unwrap(), [5.0]);
    }
}
