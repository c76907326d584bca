# A word before it gets expensive. AWS counts with a delay of hours: it informs, and does not stop anything.

resource "aws_budgets_budget" "this" {
  count        = var.budget_usd == null ? 0 : 1
  name         = local.global_name
  budget_type  = "COST"
  time_unit    = "MONTHLY"
  limit_amount = tostring(var.budget_usd)
  limit_unit   = "USD"
  tags         = local.tags

  dynamic "notification" {
    for_each = { ACTUAL = 80, FORECASTED = 100 }
    content {
      notification_type         = notification.key
      threshold                 = notification.value
      threshold_type            = "PERCENTAGE"
      comparison_operator       = "GREATER_THAN"
      subscriber_sns_topic_arns = [aws_sns_topic.this.arn]
    }
  }

  depends_on = [aws_sns_topic_policy.this] # AWS looks whether it may publish
}
